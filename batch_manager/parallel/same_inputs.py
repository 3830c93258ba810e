"""Callbacks on every rank: rank 0 asks the other ranks to call theirs, and compares what they were handed.

Rank 0 asks before it calls its own callback, so that a collective of the user's inside get or poll meets on all ranks.
The other side is loop/followed_callbacks.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from ..errors import DeviceLostError, InvalidRequestError
from .ranks import Leader, in_words
from .wire import pack

MOST_ITEMS = 1 << 20             # an iterator may be endless
Described = tuple[int | None, bytes]


class SameInputs:
    """The four callbacks of rank 0, for an engine whose other ranks have callbacks too."""

    def __init__(self, leader: Leader, get: Callable[[int], Any], send: Callable[..., None],
                 poll: Callable[[], Any] | None, stats: Callable[[str], None] | None, *,
                 describe: Callable[[Any], Described], refused: Callable[[int, InvalidRequestError], Any]) -> None:
        """
        describe   (item) -> its usable id or None, and a digest
        refused    (id, error) -> an item that the engine refuses with this error
        """
        self._leader, self._get, self._send, self._poll, self._stats = leader, get, send, poll, stats
        self._describe, self._refused = describe, refused
        self._outgoing: list[bytes] = []
        self._own_refusals: Counter[tuple[int, str]] = Counter()
        leader.before_end = self.flush

    # ---------------------------------------------------------------- the callbacks

    def get(self, max_num_requests: int) -> Sequence[Any]:
        """Return the items that every rank was handed, and a refused item for each other one of rank 0.

        Returns nothing once a rank is lost: the others cannot be asked, and a collective inside get would wait for it.
        """
        if not self._tell(("get", max_num_requests)):
            return ()
        items: list[Any] = []
        agreed: list[Any] = []
        try:
            given = self._get(max_num_requests)
            items.extend(given if isinstance(given, list | tuple) else islice(given, MOST_ITEMS) if given is not None
                         else ())
        finally:                                       # the others wait for a verdict, also if get raises
            with suppress(DeviceLostError):
                agreed = self._agreed(items)
        return agreed

    def send(self, request_id: int, tensors: Sequence[Any], final: bool, error: str) -> None:
        refusal = request_id, error
        if refusal in self._own_refusals:
            self._own_refusals.subtract([refusal])
            if not self._own_refusals[refusal]:
                del self._own_refusals[refusal]
        else:                                          # as bytes: the callback may change the arrays
            self._outgoing.append(pack((request_id, tuple([(tensor.name, tensor.array) for tensor in tensors]), final,
                                        str(error))))
        self._send(request_id, tensors, final, error)

    def poll(self) -> Iterable[Any]:
        self._tell(("poll",))
        return () if self._poll is None else self._poll()

    def stats(self, record: str) -> None:
        self._tell(("stats", record))
        if self._stats is not None:
            self._stats(record)

    def flush(self) -> None:
        """Send the responses that the other ranks have not got yet."""
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._leader.lost is None:
            with suppress(DeviceLostError):
                self._leader.ask(("responses", tuple(outgoing)))

    def _tell(self, value: tuple[Any, ...]) -> bool:
        """Send a frame after the responses so far. Returns whether no rank is lost."""
        self.flush()
        if self._leader.lost is None:
            with suppress(DeviceLostError):
                self._leader.ask(value)
        return self._leader.lost is None

    # ---------------------------------------------------------------- the comparison

    def _agreed(self, items: list[Any]) -> list[Any]:
        handed = {0: [self._describe(item) for item in items]}
        for rank, (_, theirs) in sorted(self._leader.answers().items()):
            handed[rank] = list(theirs)
        if not any(handed.values()):
            return []
        keys = {rank: _numbered(described) for rank, described in handed.items()}
        same = _same(keys)
        for rank in handed:
            refusals = tuple([(index, self._error(key, keys).response_text()) for index, key in enumerate(keys[rank])
                              if key not in same])
            if rank:
                self._leader.ask(("verdict", refusals), rank)
        self._leader.num_differences += len({key[0] for of_rank in keys.values() for key in of_rank if key not in same})
        agreed = []
        for item, key in zip(items, keys[0], strict=True):
            request_id = key[0]
            if key not in same and request_id is not None:
                error = self._error(key, keys)
                self._own_refusals[request_id, error.response_text()] += 1
                item = self._refused(request_id, error)
            agreed.append(item)
        return agreed

    @staticmethod
    def _error(key: "Key", keys: "dict[int, list[Key]]") -> InvalidRequestError:
        request_id = key[0]
        missing = [rank for rank, of_rank in keys.items() if all(other[0] != request_id for other in of_rank)]
        differing = [rank for rank, of_rank in keys.items() if rank not in missing and key not in of_rank]
        how = []
        if missing:
            how.append(f"it is missing on {in_words(missing)}")
        if differing:
            how.append(f"it is another one on {in_words(differing)}")
        if not how:
            how.append("its place among the requests is not the same on " + in_words(list(keys)))
        return InvalidRequestError(
            f"request {request_id}: {' and '.join(how)}",
            "with callbacks on every rank, each must hand over equal requests in one order",
            "broadcast the requests inside get, or pass callbacks on rank 0 alone")


Key = tuple[int | None, bytes, int]      # id, digest, and how many equal ones came before


def _numbered(described: Iterable[Described]) -> list[Key]:
    seen: Counter[Described] = Counter()
    keys = []
    for each in described:
        keys.append((*each, seen[each]))
        seen[each] += 1
    return keys


def _same(keys: dict[int, list[Key]]) -> set[Key]:
    """Return the items that every rank has, at the same place among those that every rank has."""
    common = set.intersection(*map(set, keys.values()))
    in_order = [[key for key in of_rank if key in common] for of_rank in keys.values()]
    return {key for key, *others in zip(*in_order, strict=True) if all(other == key for other in others)}
