"""What steps find and leave per slot, by position, kept until no earlier step can run again."""

from typing import Any

COLUMNS = 4        # a power of two: what a step finds, what it leaves, and what two steps after it leave


class PositionRing:
    """The newest values of each slot, one for each position.

    A step that fails is run again, perhaps after the steps that were launched after it. It must find what it found the
    first time. So a value is stored by the position it belongs to, and only one COLUMNS positions further on replaces
    it.

    values   [slots, columns, ...] a numpy array or a tensor, indexed with arrays of its own kind; slots may be added by
             assigning a longer one
    """

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        assert values.shape[1] == COLUMNS
        self.values = values

    def at(self, slots: Any, positions: Any) -> Any:
        """[n, ...]: the values at these positions. slots, positions [n]"""
        return self.values[slots, positions & COLUMNS - 1]

    def put(self, slots: Any, positions: Any, values: Any) -> None:
        """Store values at these positions. slots, positions, values [n]"""
        self.values[slots, positions & COLUMNS - 1] = values
