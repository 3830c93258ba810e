"""The block tables on the device, at one address for the life of an engine."""

import numpy as np
import torch

from ..handover import BlockTableUpdates
from .block_tables import BlockTables

MOST_NOTED = 1 << 16               # changes that are kept before those of one entry become one


class ResidentTables:
    """A copy of the host's block tables on the device; entries that changed since a step read it go with the next one.

    there   [num_rows + 1, max_blocks] int32 on the device; the last row belongs to no sequence
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self._num_rows, self._max_blocks = num_rows, max_blocks
        self.there = torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self._changed: list[np.ndarray] = []
        self._num_noted, self._most_noted = 0, MOST_NOTED

    @property
    def spare_entry(self) -> int:
        """An entry of the flat table that no sequence has."""
        return self._num_rows * self._max_blocks

    def note(self, updates: BlockTableUpdates) -> None:
        """These entries of the host's tables have changed. Rows and columns beyond this table's are left out."""
        rows, indices = updates.slots, updates.indices
        inside = (rows < self._num_rows) & (indices < self._max_blocks)
        self._changed.append((rows.astype(np.int64) * self._max_blocks + indices)[inside])
        self._num_noted += len(self._changed[-1])
        if self._num_noted > self._most_noted:          # no step has read the table for long
            self._most_noted = 2 * len(self._once()) + MOST_NOTED

    def changes(self, tables: BlockTables) -> tuple[np.ndarray, np.ndarray]:
        """(entries of the flat table [u] int64, each once, their blocks [u] int32) that the device does not have yet.

        tables   the host's, with all changes that were noted
        """
        if not self._changed:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        entries = self._once()
        return entries, tables.rows[np.divmod(entries, self._max_blocks)]

    def are_sent(self) -> None:
        """The device gets what `changes` returned last."""
        self._changed.clear()
        self._num_noted, self._most_noted = 0, MOST_NOTED

    def _once(self) -> np.ndarray:
        """The entries that changed, each once."""
        entries = np.unique(np.concatenate(self._changed))
        self._changed, self._num_noted = [entries], len(entries)
        return entries
