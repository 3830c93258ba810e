"""An event that happens once."""

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
