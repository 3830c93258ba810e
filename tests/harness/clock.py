"""The clock of the tests. It moves only when a test moves it."""

from collections.abc import Callable

from batch_manager.testing import ManualClock


class VirtualClock(ManualClock):
    """A `ManualClock` that can also act when it is read.

    Other threads can act while an engine reads the clock. `interrupt` simulates such a thread without starting one.
    """

    def __init__(self, now: float = 1000.0) -> None:
        super().__init__(now)
        self._readings_left = -1
        self._at_reading: Callable[[], None] | None = None

    def monotonic(self) -> float:
        if self._readings_left >= 0:
            self._readings_left -= 1
            if self._readings_left < 0:
                self._at_reading()
        return self.now

    def interrupt(self, readings: int, action: Callable[[], None]) -> None:
        """Call `action` once, after `readings` readings, at the next one."""
        self._readings_left, self._at_reading = readings, action
