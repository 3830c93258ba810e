"""The clock of a simulation."""

from ...clock import SystemClock


class VirtualClock(SystemClock):
    """A clock that only the simulation advances.

    now   seconds since the simulation began
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def timestamp(self) -> str:
        return f"{self.now:.6f}"
