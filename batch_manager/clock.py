"""The system's clock, and a wrapper that makes a custom clock reliable."""

import logging
import threading
import time
from functools import partial

from .contained_log import RateLimitedLog
from .errors import is_a, type_name
from .guard import ForeignCodeError, Guard
from .seams import Clock

LATEST_S = 1e12    # thirty thousand years; a larger reading is invalid


class SystemClock:
    """The clock of this machine."""

    monotonic = staticmethod(time.monotonic)
    timestamp = staticmethod(partial(time.strftime, "%m-%d-%Y %H:%M:%S"))


class ReliableClock:
    """Wraps a custom clock, so that no response is lost when the custom clock fails.

    While the custom clock raises or returns an invalid time, `monotonic` continues from the last valid reading at the
    pace of the system's clock. `timestamp` returns the system's timestamp if the custom clock raises or returns a value
    that is not a string.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = time.monotonic()
        self._failing_since: float | None = None    # by the system's clock
        self._in_timestamp = Guard().raising("timestamp")
        self._log = RateLimitedLog(time.monotonic)

    def monotonic(self) -> float:
        # Not in a guarded block, because each block reads the time twice. A forked child ends when it leaves the block
        # that reads this clock.
        try:
            now = float(self._clock.monotonic())
            if not abs(now) < LATEST_S:
                raise ValueError("the time is out of range, or not a number")
        except BaseException as error:
            return self._continued(error)
        self._last, self._failing_since = now, None
        return now

    def timestamp(self) -> str:
        try:
            with self._in_timestamp:
                text = self._clock.timestamp()
                if type(text) is not str:
                    raise TypeError("the timestamp is not a string")
                text.encode()
        except ForeignCodeError as failure:
            self._note(failure.error)
            return SystemClock.timestamp()
        return text

    def _continued(self, error: BaseException) -> float:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            if is_a(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise error                             # the first Ctrl-C is meant for the caller of `health`
        self._note(error)
        return self._last + (now - self._failing_since)

    def _note(self, error: BaseException) -> None:
        self._log.log(logging.ERROR, "reading Parts.clock raised %s; the system's clock takes over until Parts.clock "
                      "works again", type_name(error))


def reliable(clock: Clock | None) -> Clock:
    """Return the engine's clock: the custom clock made reliable, or the system's clock if there is no custom one."""
    if clock is None:
        return SystemClock()
    return clock if isinstance(clock, SystemClock | ReliableClock) else ReliableClock(clock)
