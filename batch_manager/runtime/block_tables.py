"""The backend's block tables on the host: the KV cache blocks of the sequence in each slot, in order."""

import numpy as np

from ..handover import BlockTableUpdates, ScheduledBatch

MOST_NOTED = 1 << 16               # noted changes after which repeated entries are merged


def generation_rows(batch: ScheduledBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (slots, KV cache lengths before the step, indices of block table rows) of the generation rows.

    Each is an array [g * beam width] int32 for g generation requests, with one entry for each beam.
    """
    generation, per_slot = batch.generation, np.int32(batch.max_beam_width)
    slots, kv_lengths, width = generation.slots, generation.kv_lengths, generation.beam_width
    if width == 1:
        return slots, kv_lengths, slots if per_slot == 1 else slots * per_slot
    rows = (slots * per_slot)[:, None] + np.arange(width, dtype=np.int32)
    return np.repeat(slots, width), np.repeat(kv_lengths, width), rows.ravel()


class BlockTables:
    """The block ids of each sequence, in order: one row per slot, or per beam of each slot.

    The capacity at least doubles when a slot number or the length of a table exceeds it.

    rows     [slots * beams, max_blocks] int32. Entries after the sequence's last block are undefined (any id, or -1),
             and so are entries of blocks that were released when they left the window
    mapped   [slots * beams] int32: number of leading entries that were written for the sequence in the slot
    copied   (rows, blocks) of a copy of the tables on the device, for which changed entries are noted. The copy has no
             entries outside these sizes. None: there is no copy, and nothing is noted
    """

    def __init__(self, num_slots: int, max_blocks: int, copied: tuple[int, int] | None = None) -> None:
        self.rows = np.zeros((max(num_slots, 1), max(max_blocks, 1)), np.int32)
        self.mapped = np.zeros(len(self.rows), np.int32)
        self.copied = copied
        self._changed: list[np.ndarray] = []
        self._num_noted, self._most_noted = 0, MOST_NOTED

    def update(self, batch: ScheduledBatch) -> None:
        """Apply the block table changes of a batch. Idempotent."""
        for work in batch.context:
            if work.setup is not None:                            # a new sequence in the slot, without blocks yet
                first = work.slot * batch.max_beam_width
                stop = first + batch.max_beam_width
                if stop > len(self.rows):
                    self._grow(stop, 0)
                self.mapped[first:stop] = 0
        if len(batch.block_table_updates.slots):
            self._apply(batch.block_table_updates)

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what changed since the newest call of `forget_changes`.

        They are indices [u] int64 of distinct entries of the flattened copy, and the new blocks [u] int32 of these.
        """
        if not self._changed:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        entries = self._merged()
        return entries, self.rows[np.divmod(entries, self.copied[1])]

    def forget_changes(self) -> None:
        """Forget the noted changes. Call this method after a launch that sent the result of `changes`."""
        self._changed.clear()
        self._num_noted, self._most_noted = 0, MOST_NOTED

    def _merged(self) -> np.ndarray:
        """Merge the noted changes and return the distinct entries."""
        entries = np.unique(np.concatenate(self._changed))
        self._changed, self._num_noted = [entries], len(entries)
        return entries

    def _apply(self, updates: BlockTableUpdates) -> None:
        slots, indices = updates.slots, updates.indices
        num_slots, max_blocks = int(slots.max()) + 1, int(indices.max()) + 1
        if num_slots > self.rows.shape[0] or max_blocks > self.rows.shape[1]:
            self._grow(num_slots, max_blocks)
        self.rows[slots, indices] = updates.block_ids
        np.maximum.at(self.mapped, slots, indices + 1)
        if self.copied is not None:
            most_rows, most_blocks = self.copied
            inside = (slots < most_rows) & (indices < most_blocks)
            self._changed.append((slots.astype(np.int64) * most_blocks + indices)[inside])
            self._num_noted += len(self._changed[-1])
            if self._num_noted > self._most_noted:      # no step has sent them for a long time
                self._most_noted = 2 * len(self._merged()) + MOST_NOTED

    def _grow(self, num_slots: int, max_blocks: int) -> None:
        shape = tuple(size if size >= needed else max(2 * size, needed)
                      for size, needed in zip(self.rows.shape, (num_slots, max_blocks)))
        rows, mapped = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        rows[: self.rows.shape[0], : self.rows.shape[1]] = self.rows
        mapped[: len(self.mapped)] = self.mapped
        self.rows, self.mapped = rows, mapped
