"""The real time, and a clock of the user's making as the engine can rely on it."""

import math
import threading
import time

from .contained_log import log
from .errors import is_a, type_name
from .seams import Clock

SECONDS_BETWEEN_LOGS = 1.0
LATEST_S = 1e12    # thirty thousand years; what is later is no time


class SystemClock:
    """Time of this machine."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def timestamp() -> str:
        return time.strftime("%m-%d-%Y %H:%M:%S")


class ReliableClock:
    """Another clock, whose failures cost nobody a response.

    While that one raises, or says what can be no time, it goes on from its last answer as the system's does; a
    `timestamp` that is no text is the system's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = time.monotonic()
        self._failing_since: float | None = None    # of the system
        self._last_log = -math.inf

    def monotonic(self) -> float:
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
            text = self._clock.timestamp()
            if type(text) is not str:
                raise TypeError("no text")
            text.encode()
        except BaseException as error:
            self._log(error, time.monotonic())
            return SystemClock.timestamp()
        return text

    def _without_it(self, error: BaseException) -> float:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            if is_a(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise error                             # the first is meant for whoever asks for `health`
        self._log(error, now)
        return self._last + (now - self._failing_since)

    def _log(self, error: BaseException, now: float) -> None:
        if now - self._last_log >= SECONDS_BETWEEN_LOGS:
            self._last_log = now
            log.error("the clock of Parts raised %s; time goes on as the system's does", type_name(error))


def reliable(clock: Clock | None) -> Clock:
    """What the engine takes for its clock: the system's where there is none."""
    if clock is None:
        return SystemClock()
    return clock if isinstance(clock, SystemClock | ReliableClock) else ReliableClock(clock)
