"""The block tables on the device, at a fixed address while the engine lives."""

import numpy as np
import torch

from ..handover import BlockTableUpdates
from .block_tables import BlockTables

MOST_NOTED = 1 << 16               # noted changes after which repeated entries are merged


class ResidentTables:
    """A copy of the host's block tables on the device. Each step sends the entries that changed since the last step.

    tensor   [num_rows + 1, max_blocks] int32 on the device; the last row belongs to no sequence
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self._num_rows, self._max_blocks = num_rows, max_blocks
        self.tensor = torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self._changed: list[np.ndarray] = []
        self._num_noted, self._most_noted = 0, MOST_NOTED

    @property
    def spare_entry(self) -> int:
        """Index of an unused entry of the flat table."""
        return self._num_rows * self._max_blocks

    def note(self, updates: BlockTableUpdates) -> None:
        """Note the entries of the host's tables that `updates` changed. Entries outside this table are ignored."""
        rows, indices = updates.slots, updates.indices
        inside = (rows < self._num_rows) & (indices < self._max_blocks)
        self._changed.append((rows.astype(np.int64) * self._max_blocks + indices)[inside])
        self._num_noted += len(self._changed[-1])
        if self._num_noted > self._most_noted:          # no step has read the table for a long time
            self._most_noted = 2 * len(self._once()) + MOST_NOTED

    def changes(self, tables: BlockTables) -> tuple[np.ndarray, np.ndarray]:
        """Return the changes to send: indices [u] int64 of distinct entries of the flat table, their blocks [u] int32.

        tables   the host's tables, with all noted changes
        """
        if not self._changed:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        entries = self._once()
        return entries, tables.rows[np.divmod(entries, self._max_blocks)]

    def are_sent(self) -> None:
        """Forget the noted changes. Call this method after sending the result of `changes`."""
        self._changed.clear()
        self._num_noted, self._most_noted = 0, MOST_NOTED

    def _once(self) -> np.ndarray:
        """Merge the noted changes and return the distinct entries."""
        entries = np.unique(np.concatenate(self._changed))
        self._changed, self._num_noted = [entries], len(entries)
        return entries
