"""An event that is set once, and checks of the arguments `drain` and `timeout`."""

import math
import threading

LONGEST_SLEEP_S = 1.0


class OneShotEvent:
    """An event like threading.Event, without `clear`, that is set by one C call.

    An asynchronous exception in the thread that sets the event cannot leave a lock held, as it can in threading.Event.
    Each thread that wakes up wakes the next waiting thread. If an exception such as Ctrl-C stops a thread before it
    wakes the next one, the others wake by themselves after at most LONGEST_SLEEP_S.
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
        """Wait up to `seconds` for the event. Returns whether it is set."""
        while not self.is_set and seconds > 0:
            if self._held_until_set.acquire(timeout=min(seconds, LONGEST_SLEEP_S)):
                self._held_until_set.release()
            seconds -= LONGEST_SLEEP_S
        return self.is_set


def check_drain(drain: object) -> None:
    """Raise TypeError unless `drain` is True or False. A number is probably a timeout in the wrong position."""
    if not isinstance(drain, bool):
        raise TypeError(f"drain is of type {type(drain).__name__}; expected True or False; pass seconds as timeout=...")


def checked_timeout(timeout: float | None) -> float | None:
    """Return the timeout in seconds, in the range that Thread.join accepts; None means no limit.

    Raises ValueError for NaN, and TypeError for a value that is not a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, str | bytes | bytearray):    # float() would parse it
        raise TypeError(f"timeout is of type {type(timeout).__name__}; expected seconds, or None for no limit")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf if timeout > 0 else -math.inf
    if seconds != seconds:
        raise ValueError("timeout is NaN; expected seconds, or None for no limit")
    return min(seconds, threading.TIMEOUT_MAX)
