"""An event that comes once."""

import threading


class End:
    """Comes by one call of C: an exception that strikes in the thread that sets it leaves no lock taken, as it may
    inside of threading.Event."""

    def __init__(self) -> None:
        self.has_come = False
        self._until_then = threading.Lock()
        self._until_then.acquire()

    def set(self) -> None:
        if not self.has_come:
            self.has_come = True
            self._until_then.release()

    def wait(self, seconds: float) -> bool:
        if not self.has_come and self._until_then.acquire(timeout=seconds):
            self._until_then.release()
        return self.has_come
