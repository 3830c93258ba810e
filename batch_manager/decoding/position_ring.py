"""Stores values of each slot by position. A value is kept as long as a step that reads it can run again."""

from typing import Any

COLUMNS = 4        # a power of two: the value that a step reads, and the values that it and two later steps write


def columns_for(max_draft_tokens: int) -> int:
    """Return the columns of a ring for steps with up to `max_draft_tokens` drafts of a sequence, a power of two.

    Such a step reads one value and writes one for each draft and one more. It is read before the next one is launched.
    """
    return max(COLUMNS, 1 << (max_draft_tokens + 1).bit_length())


class PositionRing:
    """The newest values of each slot, one for each position.

    A failed step is run again, possibly after later steps were launched. It must read the same values as the first
    time. Each value is therefore stored by its position, and is overwritten by the value `columns` positions later.

    values   [slots, columns, ...] a numpy array, indexed with arrays, or a tensor, indexed with tensors; assign a
             longer array or tensor to add slots. `columns` is a power of two, at least COLUMNS
    """

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        assert values.shape[1] >= COLUMNS and values.shape[1].bit_count() == 1
        self.values = values

    def at(self, slots: Any, positions: Any) -> Any:
        """Return the values [n, ...] of `slots` [n] at `positions` [n]."""
        return self.values[slots, positions & self.values.shape[1] - 1]

    def put(self, slots: Any, positions: Any, values: Any) -> None:
        """Store `values` [n, ...] for `slots` [n] at `positions` [n]."""
        self.values[slots, positions & self.values.shape[1] - 1] = values
