"""Numbers that one feature keeps per slot: read on the host to see who has it, on the device to carry it out."""

import numpy as np
import torch

from .slots import DrawRows


class SlotTable:
    """Columns with one number per slot, and who has the feature they belong to; everybody else has neutral numbers.

    host      the columns as numpy arrays
    neutral   numpy scalars: their values, and their types
    Grows by doubling. The device's copies follow when they are next asked for; on a CPU there is nothing to copy.
    """

    def __init__(self, num_slots: int, device: torch.device, **neutral: np.generic) -> None:
        self._device, self._neutral = device, neutral
        self.host = {name: np.full(max(num_slots, 1), value) for name, value in neutral.items()}
        self._has = np.zeros(max(num_slots, 1), np.bool_)
        self._num_having = 0
        self._columns: dict[str, torch.Tensor] | None = None

    def put(self, slot: int, has: bool, **values: float) -> None:
        """A sequence takes the slot, with the feature and these numbers, or without it."""
        if slot >= len(self._has):
            if not has:
                return                                  # beyond the table nobody has it
            self._grow(slot + 1)
        if not has and not self._has[slot]:
            return
        self._num_having += int(has) - int(self._has[slot])
        self._has[slot] = has
        for name, neutral in self._neutral.items():
            self.host[name][slot] = values[name] if has else neutral
        self._columns = None

    def is_wanted(self, rows: DrawRows) -> bool:
        """Whether any of the rows has the feature. Costs nothing where no slot has."""
        return self._num_having > 0 and bool(self.having(rows).any())

    def having(self, rows: DrawRows) -> np.ndarray:
        """[r] bool on the host: which rows have the feature."""
        if rows.slots.max(initial=-1) >= len(self._has):
            self._grow(int(rows.slots.max()) + 1)
        return self._has[rows.slots]

    def indices(self, rows: DrawRows) -> np.ndarray:
        """The rows that have the feature, rising."""
        return np.nonzero(self.having(rows))[0]

    def column(self, name: str, rows: DrawRows) -> torch.Tensor:
        """[r] on the device: a column's values for the rows."""
        if self._columns is None:
            self._columns = {name: torch.from_numpy(column).to(self._device) for name, column in self.host.items()}
        return self._columns[name][rows.device_slots]

    def _grow(self, num_slots: int) -> None:
        before = len(self._has)
        capacity = max(2 * before, num_slots)
        for name, neutral in self._neutral.items():
            column = np.full(capacity, neutral)
            column[:before] = self.host[name]
            self.host[name] = column
        has = np.zeros(capacity, np.bool_)
        has[:before] = self._has
        self._has, self._columns = has, None
