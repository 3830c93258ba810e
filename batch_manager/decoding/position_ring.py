"""Per-slot values by position, kept until no step that reads them can run again."""

from typing import Any

COLUMNS = 4        # a power of two: the value that a step reads, and those that it and two later steps write


class PositionRing:
    """The newest values of each slot, one for each position.

    A failed step is run again, possibly after later steps were launched. It must read the same values as the first
    time. So each value is stored by its position, and is overwritten only by the value COLUMNS positions later.

    values   [slots, COLUMNS, ...] a numpy array or a tensor, indexed with arrays or tensors respectively; assign a
             longer one to add slots
    """

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        assert values.shape[1] == COLUMNS
        self.values = values

    def at(self, slots: Any, positions: Any) -> Any:
        """Return the values [n, ...] at these positions. slots, positions [n]"""
        return self.values[slots, positions & COLUMNS - 1]

    def put(self, slots: Any, positions: Any, values: Any) -> None:
        """Store values at these positions. slots, positions, values [n]"""
        self.values[slots, positions & COLUMNS - 1] = values
