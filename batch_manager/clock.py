"""The real time, and a clock of the user's making as the engine can rely on it."""

import logging
import threading
import time
from functools import partial

from .contained_log import RateLimitedLog
from .errors import is_a, type_name
from .guard import ForeignCodeError, Guard
from .seams import Clock

LATEST_S = 1e12    # thirty thousand years; what is later is no time


class SystemClock:
    """Time of this machine."""

    monotonic = staticmethod(time.monotonic)
    timestamp = staticmethod(partial(time.strftime, "%m-%d-%Y %H:%M:%S"))


class ReliableClock:
    """Another clock, whose failures cost no response.

    While that one raises, or says what can be no time, it goes on from its last answer as the system's does; a
    `timestamp` that is no text is the system's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = time.monotonic()
        self._failing_since: float | None = None    # of the system
        self._in_timestamp = Guard().raising("timestamp")
        self._log = RateLimitedLog(time.monotonic)

    def monotonic(self) -> float:
        # Not in a block of the guard: each block reads the time twice. A forked child ends where it leaves the block.
        try:
            now = float(self._clock.monotonic())
            if not abs(now) < LATEST_S:
                raise ValueError("no time")
        except BaseException as error:
            return self._without_it(error)
        self._last, self._failing_since = now, None
        return now

    def timestamp(self) -> str:
        try:
            with self._in_timestamp:
                text = self._clock.timestamp()
                if type(text) is not str:
                    raise TypeError("no text")
                text.encode()
        except ForeignCodeError as failure:
            self._note(failure.error)
            return SystemClock.timestamp()
        return text

    def _without_it(self, error: BaseException) -> float:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            if is_a(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise error                             # the first is meant for the caller of `health`
        self._note(error)
        return self._last + (now - self._failing_since)

    def _note(self, error: BaseException) -> None:
        self._log.log(logging.ERROR, "the clock of Parts raised %s; time goes on as the system's does",
                      type_name(error))


def reliable(clock: Clock | None) -> Clock:
    """What the engine takes for its clock: the system's where there is none."""
    if clock is None:
        return SystemClock()
    return clock if isinstance(clock, SystemClock | ReliableClock) else ReliableClock(clock)
