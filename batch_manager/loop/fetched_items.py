"""Reads the return values of the get callback."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import getattr_static
from itertools import islice
from operator import length_hint
from typing import Any, Protocol

from ..contained_log import RateLimitedLog
from ..errors import BatchManagerError
from ..guard import Guard
from ..requests.inference_request import InferenceRequest

LISTS = (list, tuple)     # reading one runs no user code
MOST_ITEMS = 1 << 20    # an iterator may be endless, and its length hint wrong
FIRST_BACK_OFF_S = 0.001
LONGEST_BACK_OFF_S = 0.1


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """Stands for an item that must not be accepted. The engine refuses it with the error."""

    request_id: int
    error: BatchManagerError


class AlikeItems(Protocol):
    """Makes sure that several ranks are handed the same items; see parallel.same_inputs, which implements it."""

    def begin(self, max_num_requests: int) -> bool:
        """Called before get. Returns whether to call it."""
        ...

    def keep_alike(self, items: deque[Any]) -> None:
        """Replace each item that is not the same on every rank. Called after get, also if get raised."""
        ...


class FetchedItems:
    """Items that the get callback returned and that no iteration has decided yet, oldest first.

    What get returns is read at once: a list or a tuple whole; any other object up to its length or length hint, or up
    to `most_unsized` items if that is more, and one item beyond if it has a size, but never beyond MOST_ITEMS. What is
    left is dropped. A warning says so whenever as many items were read as that allows, because then more may be left.
    If the object raises, the items before the exception are kept. An InferenceRequest that is not in a collection is
    read, and the misuse logged.

    No asynchronous exception can lose an item; unanswered.py explains how. Each `with in_get:` statement makes a single
    call. If it made two, an asynchronous exception between them would look like an exception of the user's object.

    in_get     the guarded block for the get callback and for reading its result; both run user code
    back_off   the time without calls after a failure of the get callback or of reading its result
    """

    def __init__(self, get: Callable[[int], Any], guard: Guard, undecided: list[Any], most_unsized: int,
                 alike: AlikeItems | None = None) -> None:
        """
        get            the get callback
        undecided      list to which `read_next` appends the item that it takes
        most_unsized   number of items that an object without a length may have
        alike          with callbacks on several ranks: what compares the items
        """
        self._get, self._guard = get, guard
        self.back_off = BackOff(guard)
        self.in_get = guard.containing("get", on_failure=self.back_off.grow)
        self._undecided, self._most_unsized, self._alike = undecided, most_unsized, alike
        self._log = RateLimitedLog(lambda: guard.monotonic())
        self._returned: list[Any] = []                 # what get returned, until it is read
        self._reading: list[Iterator[Any]] = []        # its iterator: a second reading continues the first
        self._unread: deque[Any] = deque()

    def __bool__(self) -> bool:
        """Whether items may be left."""
        return bool(self._unread or self._returned)

    def ask(self, max_num_requests: int) -> None:
        """Call get with `max_num_requests`, unless a back-off is active or items of an earlier call are left."""
        back_off, returned = self.back_off, self._returned
        if self._unread or returned or (back_off.seconds and not back_off.is_over):
            return
        alike = self._alike
        if alike is not None and not alike.begin(max_num_requests):
            return
        with self.in_get:
            returned.extend(map(self._get, (max_num_requests,)))
        if returned:
            back_off.seconds = 0.0
            if returned[0] is None or type(returned[0]) in LISTS and not returned[0]:
                del returned[0]
            else:
                self._read()
        if alike is not None:
            alike.keep_alike(self._unread)

    def read_next(self) -> bool:
        """Move the oldest item to `undecided`. Returns False if there is no item."""
        if self._returned:    # an asynchronous exception interrupted the reading
            self._read()
        if not self._unread:
            return False
        self._undecided += (self._unread[0],)    # no call from here to the end
        del self._unread[0]
        return True

    def _read(self) -> None:
        """Read the returned object, or what an interrupted reading has left of it."""
        returned, reading, size = self._returned, self._reading, [0]
        value, kind, most = returned[0], type(returned[0]), None
        if kind not in LISTS and not reading:
            is_request = issubclass(kind, InferenceRequest)
            if is_request or getattr_static(kind, "__iter__", getattr_static(kind, "__getitem__", None)) is None:
                self._guard.note_misuse("get", value, "expected an iterable of InferenceRequests"
                                        + "; the request is read all the same" * is_request)
                if not is_request:
                    self.back_off.grow()
                returned[0] = (value,) * is_request
            else:
                hint = map(length_hint, returned)
                with self.in_get:
                    size[:] = hint
                # One item more than a size says shows whether the size was right. Without a size, the next item is left
                # where it is: a generator may take its items out of a queue.
                most = min(max(*size, self._most_unsized) + bool(size[0]), MOST_ITEMS)
        if not reading:
            iterator = map(islice, returned, (most,))
            with self.in_get:
                reading.extend(iterator)
        if reading:
            with self.in_get:
                self._unread.extend(reading[0])
        if len(self._unread) == most:
            self._log.log(logging.WARNING, "the get callback returned an iterable without a size, such as a generator, "
                          "or with a wrong one; the first %d items were read, more are dropped; return a list", most)
        del returned[0], reading[:]


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
