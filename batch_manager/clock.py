"""The real time, and a clock of the user's making as the engine can rely on it."""

import math
import time

from .contained_log import log
from .errors import type_name
from .seams import Clock

SECONDS_BETWEEN_LOGS = 1.0


class SystemClock:
    """Time of this machine."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def timestamp() -> str:
        return time.strftime("%m-%d-%Y %H:%M:%S")


class ReliableClock:
    """Another clock, whose failures cost nobody a response.

    While that one raises, or says what is no finite number, time goes on from its last answer as the system's does.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = time.monotonic()
        self._failing_since: float | None = None    # of the system
        self._last_log = -math.inf

    def monotonic(self) -> float:
        try:
            now = float(self._clock.monotonic())
            if not math.isfinite(now):
                raise ValueError("no finite number")
        except BaseException as error:
            return self._without_it(error)
        self._last, self._failing_since = now, None
        return now

    def timestamp(self) -> str:
        return self._clock.timestamp()

    def _without_it(self, error: BaseException) -> float:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            if isinstance(error, KeyboardInterrupt):    # the first may be meant for whoever asks for `health`
                raise error
        if now - self._last_log >= SECONDS_BETWEEN_LOGS:
            self._last_log = now
            log.error("the clock of Parts raised %s; time goes on as the system's does", type_name(error))
        return self._last + (now - self._failing_since)


def reliable(clock: Clock | None) -> Clock:
    """What the engine takes for its clock: the system's where there is none."""
    if clock is None:
        return SystemClock()
    return clock if isinstance(clock, SystemClock | ReliableClock) else ReliableClock(clock)
