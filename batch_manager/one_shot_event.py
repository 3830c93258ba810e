"""An event that happens once, and how long it may be waited for."""

import math
import threading


class OneShotEvent:
    """threading.Event without `clear`, set by one call of C.

    An exception that strikes the thread that sets it leaves no lock taken, as it may inside threading.Event.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._held_until_set = threading.Lock()
        self._held_until_set.acquire()

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._held_until_set.release()

    def wait(self, seconds: float) -> bool:
        """Returns whether it is set, after at most so many seconds."""
        if not self.is_set and self._held_until_set.acquire(timeout=seconds):
            self._held_until_set.release()
        return self.is_set


def checked_timeout(timeout: float | None) -> float | None:
    """Seconds as a thread can be joined with. Raises ValueError for NaN and TypeError for what is no number."""
    if timeout is None:
        return None
    if isinstance(timeout, str | bytes | bytearray):    # float would read the number in it
        raise TypeError(f"timeout is a {type(timeout).__name__}; seconds, or None to wait as long as it takes")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf if timeout > 0 else -math.inf
    if seconds != seconds:
        raise ValueError("timeout is NaN; seconds, or None to wait as long as it takes")
    return min(seconds, threading.TIMEOUT_MAX)
