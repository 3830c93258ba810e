"""The four callbacks, each behind the one guard: what a callback raises stays here.

get     items it gave before raising stand; the rest counts as nothing, and it is called again after a back-off
send    counts as delivered, never repeated
poll    counts as an empty set
stats   ignored
Every failure is counted; each callback's failures are logged at most once a second.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from operator import index, length_hint
from typing import Any

from ..contained_log import log
from ..errors import type_name, where_raised
from ..forked_child import Fork
from ..names import ErrorCode
from ..seams import Clock
from .owed import Owed

SECONDS_BETWEEN_LOGS = 1.0
FIRST_BACK_OFF_S = 0.001
LONGEST_BACK_OFF_S = 0.1
COLLECTIONS = {list, tuple, deque, set, frozenset, dict}
MOST_STOPS_OF_AN_ITERATOR = 1 << 20    # it may be endless; a set or a list is not

GetInferenceRequestsCallback = Callable[[int], Iterable[Any]]
SendResponseCallback = Callable[[int, list, bool, str], None]
PollStopSignalCallback = Callable[[], set[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]


class HandedOver:
    """What one call of get returned, read item by item.

    A collection that knows its size, or an iterator that knows what is left, was handed over whole: what one iteration
    does not read waits for the next. Of anything else, generators above all, only what is read within the first
    iteration was ever handed over.

    returned    what get returned, or nothing
    iterators   the one over it, once somebody wants to read
    num_taken   items that were read
    sizes       how many it had when the end began: what is added after that was never handed over
    """

    __slots__ = ("returned", "iterators", "num_taken", "sizes")

    def __init__(self) -> None:
        self.returned: list[Any] = []
        self.iterators: list[Iterator[Any]] = []
        self.num_taken = 0
        self.sizes: list[int] = []

    @property
    def is_nothing(self) -> bool:
        """There is nothing to read, as far as can be told without asking an object of the user's making."""
        if not self.returned:
            return True
        items = self.returned[0]
        return items is None or (type(items) in COLLECTIONS and not items)

    @property
    def is_whole(self) -> bool:
        return hasattr(type(self.returned[0]), "__len__") or hasattr(type(self.returned[0]), "__length_hint__")

    @property
    def is_a_copy(self) -> bool:
        """What is read is: its owner may empty the collection and use it again."""
        return type(self.returned[0]) in COLLECTIONS

    @property
    def is_used_up(self) -> bool:
        return bool(self.sizes) and self.num_taken >= self.sizes[0]


class GuardedCallbacks:
    """The user's callbacks. No method raises, whatever the callbacks do.

    An exception that somebody else raises in this thread is contained too while a callback runs, and passes at any
    other time; either way nothing that was handed over is lost and no final response is repeated (owed.py says how).

    owed              everybody who must still be answered
    failures          callback name -> how many calls failed
    seconds_inside    time spent inside callbacks since the last `take_seconds`
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        return_stats: ReturnBatchManagerStatsCallback | None,
        clock: Clock,
        heartbeat: Callable[[str, float], None] = lambda activity, now: None,
    ) -> None:
        self._get, self._send, self._poll, self._stats = (
            get_inference_requests, send_response, poll_stop_signal, return_stats)
        self._fork = Fork()
        self._clock = clock
        self._heartbeat = heartbeat
        self._last_log: dict[str, float] = {}
        self._back_off_s = 0.0
        self._get_again_at = 0.0
        self._waiting: list[HandedOver] = []
        self.owed = Owed()
        self.failures = {"get": 0, "send": 0, "poll": 0, "stats": 0}
        self.seconds_inside = 0.0

    @property
    def wants_stats(self) -> bool:
        return self._stats is not None

    @property
    def has_unread_items(self) -> bool:
        """Items were handed over that no iteration has looked at yet."""
        return bool(self._waiting)

    def take_seconds(self) -> float:
        seconds, self.seconds_inside = self.seconds_inside, 0.0
        return seconds

    def get(self, max_num_requests: int) -> None:
        """Ask for requests, unless the back-off after a failure still holds. `take` gives what was handed over.

        While items of an earlier call are unread nobody is asked for more: they would pile up without a bound.
        """
        if self._waiting:
            return
        if 0 < self._get_again_at - self._clock.monotonic() <= LONGEST_BACK_OFF_S:    # more: the clock was set back
            return
        handed_over = HandedOver()
        self._waiting.append(handed_over)
        self._keep(handed_over.returned, map(self._get, (max_num_requests,)))
        if handed_over.returned:
            self._back_off_s = 0.0
        if not self._is_open(handed_over):
            del self._waiting[-1]

    def take(self) -> bool:
        """Make the oldest item that was handed over the one that is `owed.taken`. False when there is none."""
        while self._waiting:
            handed_over = self._waiting[0]
            if self._is_open(handed_over) and not handed_over.is_used_up:
                handed_over.num_taken += 1
                self._keep(self.owed.taken, islice(handed_over.iterators[0], 1))
                if self.owed.taken:
                    return True
            del self._waiting[0]
        return False

    def begin_the_end(self) -> None:
        """What was handed over grows no more, so that it comes to an end: a client may put what was refused back into
        what holds it."""
        for handed_over in self._waiting:
            if handed_over.returned and handed_over.is_whole and not (handed_over.is_a_copy or handed_over.sizes):
                if not hasattr(type(handed_over.returned[0]), "__len__"):
                    handed_over.num_taken = 0    # it says what is left
                self._keep(handed_over.sizes, map(length_hint, handed_over.returned))

    def end_of_taking(self) -> None:
        """This iteration takes no more. What is left in something that was begun and has no size is let go."""
        if self._waiting and self._waiting[0].iterators and not self._waiting[0].is_whole:
            del self._waiting[0]

    def _is_open(self, handed_over: HandedOver) -> bool:
        """Whether there may be something to read. Begins to iterate, unless that was done."""
        if not handed_over.iterators and not handed_over.is_nothing:
            given = handed_over.returned
            self._keep(handed_over.iterators, map(iter, map(tuple, given) if handed_over.is_a_copy else given))
        return bool(handed_over.iterators)

    def _keep(self, kept: list, given: Iterator[Any]) -> None:
        """Add to `kept` what the user's code behind `given` gives, before anything can come between."""
        started = self._enter("get")
        try:
            kept.extend(given)
        except BaseException as error:
            self._failed("get", error)
        finally:
            self._leave(started)

    def send(self, request_id: int, tensors: list) -> None:
        """One response of several, not the last."""
        started = self._enter("send")
        try:
            self._send(request_id, tensors, False, "")
        except BaseException as error:
            self._failed("send", error)
        finally:
            self._leave(started)

    def send_final(self, request_id: int, tensors: list, error_message: str = "",
                   code: ErrorCode | None = None) -> None:
        """The last response of a request that is owed one."""
        self._send_owed(self.owed.alive, request_id, request_id, tensors, error_message, code)

    def send_refusal(self, error_message: str, code: ErrorCode) -> None:
        """The only response to the item whose refusal is owed longest."""
        refusals = self.owed.refusals
        self._send_owed(refusals, 0, refusals[0].request_id, [], error_message, code)

    def _send_owed(self, book: Any, key: int, request_id: int, tensors: list, error_message: str,
                   code: ErrorCode | None) -> None:
        owed, started = self.owed, self._enter("send")
        if code is not None:
            owed.errors[code] += 1
        owed.num_sent += 1
        del book[key]    # from here to the first instruction of the callback nothing can come between
        try:
            self._send(request_id, tensors, True, error_message)
        except BaseException as error:
            self._failed("send", error)
        finally:
            self._leave(started)

    def poll_stops(self) -> set[int]:
        """The ids to stop; what is not an integer is skipped."""
        if self._poll is None:
            return set()
        started = self._enter("poll")
        stops: set[int] = set()
        try:
            signals = self._poll()
            if type(signals) is set:
                if not signals:
                    return stops
                signals = signals.copy()    # its owner may add to it meanwhile
            elif not hasattr(type(signals), "__len__"):
                signals = islice(() if signals is None else signals, MOST_STOPS_OF_AN_ITERATOR)
            for signal in signals:
                if type(signal) is not bool:
                    with suppress(BaseException):    # it is no integer, whatever it raised when it was asked
                        stops.add(index(signal))
        except BaseException as error:
            self._failed("poll", error)
            stops = set()
        finally:
            self._leave(started)
        return stops

    def return_stats(self, record: str) -> None:
        """Only where `wants_stats`."""
        started = self._enter("stats")
        try:
            self._stats(record)
        except BaseException as error:
            self._failed("stats", error)
        finally:
            self._leave(started)

    def note_failure(self, name: str, error: BaseException) -> None:
        """Count and log what something else of the user's raised, as what a callback raises."""
        self._failed(name, error)

    def _enter(self, name: str) -> float:
        now = self._clock.monotonic()
        self._fork.end_the_child()
        self._heartbeat(name, now)
        return now

    def _leave(self, started: float) -> None:
        self._fork.end_the_child()
        now = self._clock.monotonic()
        self.seconds_inside += max(now - started, 0.0)
        self._heartbeat("loop", now)

    def _failed(self, name: str, error: BaseException) -> None:
        self._fork.end_the_child(error)
        self.failures[name] = self.failures.get(name, 0) + 1
        now = self._clock.monotonic()
        if name == "get":
            self._back_off_s = min(max(2 * self._back_off_s, FIRST_BACK_OFF_S), LONGEST_BACK_OFF_S)
            self._get_again_at = now + self._back_off_s
        if now - self._last_log.get(name, float("-inf")) >= SECONDS_BETWEEN_LOGS:
            self._last_log[name] = now
            log.error("the %s callback raised %s (%d so far); the loop goes on\n%s",
                      name, type_name(error), self.failures[name], where_raised(error))
