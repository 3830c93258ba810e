"""What the get callback returned, read item by item."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

from ..contained_log import RateLimitedLog
from ..guard import Guard

COLLECTIONS = {list, tuple, deque, set, frozenset, dict}
# Iterating over these, and over their subclasses that leave it as it is, runs no code of the user.
_EXAMPLES: tuple[Any, ...] = ([], (), deque(), set(), frozenset(), {}, {}.keys(), {}.values(), {}.items())
ITERATED_IN_C = frozenset(type(kind).__iter__ for example in _EXAMPLES for kind in (example, iter(example)))
FIRST_BACK_OFF_S = 0.001
LONGEST_BACK_OFF_S = 0.1


class FetchedItems:
    """Items that calls of get returned and that no iteration has read yet, the oldest first.

    A collection with a length, or an iterator with a length hint, counts as handed over whole: items that one iteration
    does not read wait for the next. Of anything else, such as a generator, only the items that the first iteration
    reads count as handed over.

    No item is lost whatever is raised, wherever; unanswered.py says how. A block of `in_get` that reads holds one call,
    which is prepared outside: an exception of another thread that struck between two calls inside would count as the
    value's own, and end the reading.

    in_get     the guarded block of the get callback and of what it returned, which runs code of the user too
    back_off   holds after a failure of either
    """

    def __init__(self, get: Callable[[int], Any], guard: Guard, undecided: list[Any]) -> None:
        """get         the callback
        undecided   receives each item that is read
        """
        self._get, self._guard = get, guard
        self.back_off = BackOff(guard)
        self.in_get = guard.containing("get", on_failure=self.back_off.grow)
        self._undecided = undecided
        self._log = RateLimitedLog(lambda: guard.monotonic())
        self._returned: deque[_Returned] = deque()

    def __bool__(self) -> bool:
        """Something was returned that may not have been read to its end."""
        return bool(self._returned)

    def ask(self, max_num_requests: int) -> None:
        """Call get, unless the back-off after a failure still holds.

        get is not called while items of an earlier call are unread: they would pile up without a bound.
        """
        back_off = self.back_off
        if self._returned or (back_off.seconds and not back_off.is_over):
            return
        returned = _Returned()
        self._returned.append(returned)
        with self.in_get:
            returned.value.extend(map(self._get, (max_num_requests,)))
        if returned.value:
            back_off.seconds = 0.0
            if not returned.is_iterable:
                back_off.grow()
                self._guard.note_misuse("get", returned.value[0], "an iterable of InferenceRequests is expected")
                self._returned.pop()
                return
        if returned.is_nothing or not self._begin(returned):
            self._returned.pop()

    def read_next(self) -> bool:
        """Move the oldest unread item to `undecided`. False when there is none."""
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
        """This iteration reads no more. If the oldest object has no size and its reading has begun, the rest of it is
        dropped."""
        if self._returned and self._returned[0].iterator and not self._returned[0].is_sized:
            num_read = self._returned[0].num_read
            del self._returned[0]
            self._log.log(logging.WARNING, "the get callback returned something without a size, a generator perhaps; "
                          "the first %d items were read and the rest is dropped; return a list", num_read)

    def stop_growing(self) -> None:
        """Limit reading to the items that are there now, so that it comes to an end: a client may put a refused item
        back into the collection that it came from."""
        for returned in self._returned:
            if returned.value and returned.is_sized and not (returned.is_copied or returned.size_at_end):
                if not hasattr(type(returned.value[0]), "__len__"):
                    returned.num_read = 0    # its length hint says what is left
                size = map(length_hint, returned.value)
                with self.in_get:
                    returned.size_at_end.extend(size)

    def _begin(self, returned: "_Returned") -> bool:
        """Start the iteration unless it was started. Returns whether there may be something to read."""
        if not returned.iterator and not returned.is_nothing:
            iterator = map(iter, map(tuple, map(iter, returned.value)) if returned.is_copied else returned.value)
            with self.in_get:
                returned.iterator.extend(iterator)
        return bool(returned.iterator)


class _Returned:
    """What one call of get returned.

    value         it, once get has returned
    iterator      the one over it, once reading has begun
    size_at_end   how many items it had when it was to stop growing
    num_read      items that were read
    """

    __slots__ = ("value", "iterator", "size_at_end", "num_read")

    def __init__(self) -> None:
        self.value: list[Any] = []
        self.iterator: list[Iterator[Any]] = []
        self.size_at_end: list[int] = []
        self.num_read = 0

    @property
    def is_nothing(self) -> bool:
        """There is nothing to read, as far as is known without running code of the user."""
        if not self.value:
            return True
        items = self.value[0]
        return items is None or (type(items) in COLLECTIONS and not items)

    @property
    def is_iterable(self) -> bool:
        """Whether it can be iterated over, as far as is known without running code of the user. None counts as
        iterable."""
        kind = type(self.value[0])
        return kind in COLLECTIONS or self.value[0] is None or _has(kind, "__iter__") or _has(kind, "__getitem__")

    @property
    def is_sized(self) -> bool:
        kind = type(self.value[0])
        return hasattr(kind, "__len__") or hasattr(kind, "__length_hint__")

    @property
    def is_copied(self) -> bool:
        """A copy is read: the owner may empty the collection and use it again."""
        try:
            return type.__getattribute__(type(self.value[0]), "__iter__") in ITERATED_IN_C
        except AttributeError:
            return False

    @property
    def is_used_up(self) -> bool:
        return bool(self.size_at_end) and self.num_read >= self.size_at_end[0]


def _has(kind: type, name: str) -> bool:
    """Whether the objects of a class have a method of this name. Does not ask the metaclass."""
    try:
        type.__getattribute__(kind, name)
    except AttributeError:
        return False
    return True


class BackOff:
    """How long get is not called after a failure: 1 ms, doubled by each further failure up to 100 ms.

    seconds   length of the last back-off; 0: no call has failed since one returned
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
        return not 0 < seconds_left <= LONGEST_BACK_OFF_S    # more: the clock was set back
