"""Callbacks on every rank: rank 0 asks the other ranks to call theirs, and compares what they were handed.

Rank 0 asks before it calls its own callback, so that a collective of the user's inside get or poll meets on all ranks.
The other side is loop/followed_callbacks.py.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import DeviceLostError, InvalidRequestError
from .leader import Leader
from .ranks import differing, in_words
from .wire import pack

MOST_EXPLAINED = 16                      # requests of one get whose difference is looked for
Described = tuple[str, tuple[int, ...], Any]
Key = tuple[int | None, bytes, int]      # id, digest, and how many equal ones came before


class SameInputs:
    """The callbacks send, poll and stats of rank 0, for an engine whose other ranks have callbacks too, and the
    AlikeItems of its get."""

    def __init__(self, leader: Leader, send: Callable[..., None], poll: Callable[[], Any] | None,
                 stats: Callable[[str], None] | None, *, digest: Callable[[Any], tuple[int | None, bytes]],
                 fields: Callable[[Any], Sequence[Described]],
                 refused: Callable[[int, InvalidRequestError], Any]) -> None:
        """
        digest, fields   item_digest and item_fields of requests.item_digest
        refused          (id, error) -> an item that the engine refuses with this error
        """
        self._leader, self._send, self._poll, self._stats = leader, send, poll, stats
        self._digest, self._fields, self._refused = digest, fields, refused
        self._outgoing: list[bytes] = []
        self._own_refusals: Counter[tuple[int, str]] = Counter()
        leader.before_end = self.flush

    # ---------------------------------------------------------------- get

    def begin(self, max_num_requests: int) -> bool:
        """Have the other ranks call get. Returns whether rank 0 calls its own: not once a rank is lost, because a
        collective inside get would wait for it."""
        return self._tell(("get", max_num_requests))

    def keep_alike(self, items: deque[Any]) -> None:
        """Replace each item that another rank was not handed by a refused one, and tell the others the same.

        If a rank is lost meanwhile, the items stay: the engine fails, and answers them.
        """
        with suppress(DeviceLostError):
            handed = {0: [self._digest(item) for item in items], **self._answers()}
            if not any(handed.values()):
                return
            keys = {rank: _numbered(described) for rank, described in handed.items()}
            errors = self._errors(keys, items)
            for rank in list(keys)[1:]:
                self._leader.ask(("verdict", tuple([(index, errors[key].response_text())
                                                    for index, key in enumerate(keys[rank]) if key in errors])), rank)
            self._leader.num_differences += len({key[0] for key in errors})
            for index, key in enumerate(keys[0]):
                request_id = key[0]
                if key in errors and request_id is not None:
                    self._own_refusals[request_id, errors[key].response_text()] += 1
                    items[index] = self._refused(request_id, errors[key])

    def _answers(self) -> dict[int, list[Any]]:
        """Wait for an answer of every other rank."""
        return {rank: list(content) for rank, (_, content) in sorted(self._leader.answers().items())}

    def _errors(self, keys: Mapping[int, list[Key]], items: Sequence[Any]) -> dict[Key, InvalidRequestError]:
        """Return the error of each item that is not the same on every rank."""
        same, known = _same(keys), {rank: set(of_rank) for rank, of_rank in keys.items()}
        ids = {rank: {key[0] for key in of_rank} for rank, of_rank in keys.items()}
        wrong = dict.fromkeys([key for of_rank in keys.values() for key in of_rank if key not in same])
        explained = self._explained(keys, wrong, items)
        errors = {}
        for key in wrong:
            missing = [rank for rank in keys if key[0] not in ids[rank]]
            others = [rank for rank in keys if rank not in missing and key not in known[rank]]
            how = [f"it is missing on {in_words(missing)}"] if missing else []
            if others:
                how.append(f"it is another one on {in_words(others)}{explained.get(key[0], '')}")
            if not how:
                how.append(f"its place among the requests is not the same on {in_words(list(keys))}")
            errors[key] = InvalidRequestError(
                f"request {key[0]}: {' and '.join(how)}",
                "with callbacks on every rank, each must hand over equal requests in one order",
                "broadcast the requests inside get, or pass callbacks on rank 0 alone")
        return errors

    def _explained(self, keys: Mapping[int, list[Key]], wrong: Iterable[Key], items: Sequence[Any]
                   ) -> dict[int | None, str]:
        """Return id -> what differs between the ranks, for at most MOST_EXPLAINED ids. Asks the ranks if any does."""
        by_id: dict[int | None, dict[int, int]] = {}
        wrong = set(wrong)
        for rank, of_rank in keys.items():
            for index, key in enumerate(of_rank):
                if key in wrong:
                    by_id.setdefault(key[0], {}).setdefault(rank, index)
        unequal = [(number, places) for number, places in by_id.items()
                   if len({keys[rank][index][1] for rank, index in places.items()}) > 1][:MOST_EXPLAINED]
        if not unequal:
            return {}
        asked = {rank: [places[rank] for _, places in unequal if rank in places] for rank in keys}
        for rank in list(keys)[1:]:
            self._leader.ask(("fields", tuple(asked[rank])), rank)
        fields = {0: [self._fields(items[index]) for index in asked[0]], **self._answers()}
        found = {rank: dict(zip(asked[rank], fields[rank], strict=True)) for rank in keys}
        return {number: difference({rank: found[rank][index] for rank, index in places.items()})
                for number, places in unequal}

    # ---------------------------------------------------------------- the callbacks

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


def _numbered(described: Iterable[tuple[int | None, bytes]]) -> list[Key]:
    seen: Counter[tuple[int | None, bytes]] = Counter()
    keys = []
    for each in described:
        keys.append((*each, seen[each]))
        seen[each] += 1
    return keys


def _same(keys: Mapping[int, list[Key]]) -> set[Key]:
    """Return the items that every rank has, at the same place among those that every rank has."""
    common = set.intersection(*map(set, keys.values()))
    in_order = [[key for key in of_rank if key in common] for of_rank in keys.values()]
    return {key for key, *others in zip(*in_order, strict=True) if all(other == key for other in others)}


def difference(given: Mapping[int, Sequence[Described]]) -> str:
    """Return the first field in which the items of some ranks differ, with its values, as ": ...", or ""."""
    fields = {rank: {name: (tuple(shape), content) for name, shape, content in of_rank}
              for rank, of_rank in given.items()}
    for name in dict.fromkeys(name for of_rank in fields.values() for name in of_rank):
        values = {rank: of_rank.get(name, ((), "left out")) for rank, of_rank in fields.items()}
        found = differing({rank: f"{content.dtype} of shape {list(shape)}" if shape else content
                           for rank, (shape, content) in values.items()})
        if found:
            return f": {name} is {found}"
        (shape, first), *others = values.values()
        if shape:
            unlike = np.any([_bits(first) != _bits(other) for _, other in others], 0).nonzero()[0][:1]
            for index in unlike.tolist():
                place = ", ".join(map(str, np.unravel_index(index, shape)))
                found = differing({rank: content[index] for rank, (_, content) in values.items()})
                return f": {name}[{place}] is {found}"
    return ""


def _bits(numbers: np.ndarray) -> np.ndarray:
    return numbers.view(f"u{numbers.itemsize}")        # a NaN is equal to itself
