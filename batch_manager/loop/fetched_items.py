"""Reads the return values of the get callback item by item."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

from ..contained_log import RateLimitedLog
from ..guard import Guard
from ..requests.inference_request import InferenceRequest

COLLECTIONS = {list, tuple, deque, set, frozenset, dict}
# Iterating over these, and over subclasses that do not override iteration, runs no user code.
_EXAMPLES: tuple[Any, ...] = ([], (), deque(), set(), frozenset(), {}, {}.keys(), {}.values(), {}.items())
ITERATED_IN_C = frozenset(type(kind).__iter__ for example in _EXAMPLES for kind in (example, iter(example)))
FIRST_BACK_OFF_S = 0.001
LONGEST_BACK_OFF_S = 0.1


class FetchedItems:
    """Items that the get callback returned and that no iteration has read yet, oldest first.

    If the returned object has a length or a length hint, items that one iteration does not read wait for the next
    iteration. From any other object, such as a generator, the first iteration reads up to max_admissions_per_iteration
    items and drops the remaining ones. An InferenceRequest that is not in a collection is read, and the misuse logged.

    No exception can lose an item; unanswered.py explains how. Each `with in_get:` statement makes a single call, and
    everything that the call needs is created before the statement. If the statement made two calls, an asynchronous
    exception between them would look like an exception of the user's object and would end the reading.

    in_get     the guarded block for the get callback and for reading its result; both run user code
    back_off   the time without calls after a failure of the get callback or of reading its result
    """

    def __init__(self, get: Callable[[int], Any], guard: Guard, undecided: list[Any]) -> None:
        """
        get         the get callback
        undecided   list to which `read_next` appends the item that it reads
        """
        self._get, self._guard = get, guard
        self.back_off = BackOff(guard)
        self.in_get = guard.containing("get", on_failure=self.back_off.grow)
        self._undecided = undecided
        self._log = RateLimitedLog(lambda: guard.monotonic())
        self._returned: deque[_Returned] = deque()

    def __bool__(self) -> bool:
        """Whether items may be left to read."""
        return bool(self._returned)

    def ask(self, max_num_requests: int) -> None:
        """Call get with `max_num_requests`, unless a back-off is active or items of an earlier call are unread."""
        back_off = self.back_off
        if self._returned or (back_off.seconds and not back_off.is_over):
            return
        returned = _Returned()
        self._returned.append(returned)
        with self.in_get:
            returned.value.extend(map(self._get, (max_num_requests,)))
        if returned.value:
            back_off.seconds = 0.0
            if returned.is_one_request:
                self._guard.note_misuse("get", returned.value[0],
                                        "expected an iterable of InferenceRequests; the request is read all the same")
            elif not returned.is_iterable:
                back_off.grow()
                self._guard.note_misuse("get", returned.value[0], "expected an iterable of InferenceRequests")
                self._returned.pop()
                return
        if returned.is_nothing or not self._begin(returned):
            self._returned.pop()

    def read_next(self) -> bool:
        """Move the oldest unread item to `undecided`. Returns False if there is no unread item."""
        while self._returned:
            oldest = self._returned[0]
            if self._begin(oldest) and not oldest.is_used_up:
                next_item = islice(oldest.iterator[0], 1)
                with self.in_get:
                    self._undecided.extend(next_item)
                if self._undecided:
                    oldest.num_read += 1
                    return True
            del self._returned[0]
        return False

    def end_iteration(self) -> None:
        """End the reading in this iteration.

        If the object that is being read has neither a length nor a length hint, its remaining items are dropped.
        """
        if self._returned and self._returned[0].iterator and not self._returned[0].is_sized:
            num_read = self._returned[0].num_read
            del self._returned[0]
            self._log.log(logging.WARNING, "the get callback returned an iterable without a size, such as a generator; "
                          "the first %d items were read and the rest is dropped; return a list", num_read)

    def stop_growing(self) -> None:
        """Stop reading each returned object after as many items as it contains now.

        The get callback returned these objects. The reading therefore ends even if a client puts refused items back
        into one of them.
        """
        for returned in self._returned:
            if returned.value and returned.is_sized and not (returned.is_copied or returned.size_at_end):
                if not hasattr(type(returned.value[0]), "__len__"):
                    returned.num_read = 0    # a length hint counts the items that are left
                size = map(length_hint, returned.value)
                with self.in_get:
                    returned.size_at_end.extend(size)

    def _begin(self, returned: "_Returned") -> bool:
        """Create the iterator if necessary. Returns whether there may be items to read."""
        if returned.is_one_request:
            returned.value[0] = (returned.value[0],)
        if not returned.iterator and not returned.is_nothing:
            iterator = map(iter, map(tuple, map(iter, returned.value)) if returned.is_copied else returned.value)
            with self.in_get:
                returned.iterator.extend(iterator)
        return bool(returned.iterator)


class _Returned:
    """The return value of one call of the get callback.

    The first three attributes are lists with at most one element; unanswered.py explains why.

    value         the returned object; empty before the callback returns
    iterator      the iterator of the object; empty before reading begins
    size_at_end   number of items of the object when `stop_growing` was called; empty before this call
    num_read      number of items that were read
    """

    __slots__ = ("value", "iterator", "size_at_end", "num_read")

    def __init__(self) -> None:
        self.value: list[Any] = []
        self.iterator: list[Iterator[Any]] = []
        self.size_at_end: list[int] = []
        self.num_read = 0

    @property
    def is_nothing(self) -> bool:
        """Whether get has not returned yet, or has returned None or an empty built-in collection. Runs no user code."""
        if not self.value:
            return True
        items = self.value[0]
        return items is None or (type(items) in COLLECTIONS and not items)

    @property
    def is_one_request(self) -> bool:
        """Whether the object is an InferenceRequest that is not in a collection. Runs no user code."""
        return bool(self.value) and issubclass(type(self.value[0]), InferenceRequest)

    @property
    def is_iterable(self) -> bool:
        """Whether the object is iterable, as far as is known without running user code. None counts as iterable."""
        kind = type(self.value[0])
        return kind in COLLECTIONS or self.value[0] is None or _has(kind, "__iter__") or _has(kind, "__getitem__")

    @property
    def is_sized(self) -> bool:
        kind = type(self.value[0])
        return hasattr(kind, "__len__") or hasattr(kind, "__length_hint__")

    @property
    def is_copied(self) -> bool:
        """Whether the loop reads a copy of the collection, because its owner may reuse it.

        A collection is copied only if iterating over it runs no user code.
        """
        try:
            return type.__getattribute__(type(self.value[0]), "__iter__") in ITERATED_IN_C
        except AttributeError:
            return False

    @property
    def is_used_up(self) -> bool:
        return bool(self.size_at_end) and self.num_read >= self.size_at_end[0]


def _has(kind: type, name: str) -> bool:
    """Whether a class has an attribute of this name. Runs no code of the metaclass."""
    try:
        type.__getattribute__(kind, name)
    except AttributeError:
        return False
    return True


class BackOff:
    """The time after a failure during which get is not called: 1 ms, doubled by each further failure up to 100 ms.

    seconds   length of the last back-off; 0 if neither the last call of get nor reading its result failed
    ends_at   end of the last back-off, in seconds of the clock
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.seconds = 0.0
        self.ends_at = 0.0

    def grow(self) -> None:
        self.seconds = min(max(2 * self.seconds, FIRST_BACK_OFF_S), LONGEST_BACK_OFF_S)
        self.ends_at = self._guard.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        seconds_left = self.ends_at - self._guard.monotonic()
        return not 0 < seconds_left <= LONGEST_BACK_OFF_S    # a larger value means that the clock was set back
