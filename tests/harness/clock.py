"""The clock of the tests. It moves only when a test moves it."""

from collections.abc import Callable

from batch_manager.testing import ManualClock


class VirtualClock(ManualClock):
    """A `ManualClock` that can also call a function when it is read.

    `interrupt` simulates another thread that acts while the engine reads the clock, without starting a thread.
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
        """Call `action` once, at the reading that follows the next `readings` readings of the clock."""
        self._readings_left, self._at_reading = readings, action
