"""Compares sampled tokens with the second to eighth end ids of their sequences.

The first end id is a column of SlotState. Few sequences have more end ids.
"""

import numpy as np
import torch

from ..handover import SlotSetup
from .logits_rows import LogitsRows
from .slots import SlotState

COLUMNS = 7                        # a sequence has at most 8 end ids
NONE = -1                          # matches no token


class MoreEndIds:
    """Stores the second and later end ids of the sequence in each slot, and compares tokens with them.

    Slots with several end ids have the bit MORE_END_IDS in `SlotState.features`. Sequences with beams are left out,
    because beam search checks their end ids.

    _ids   [slots, COLUMNS] int64 on the device, padded with NONE; empty until the first use
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._ids = torch.empty((0, COLUMNS), dtype=torch.int64, device=state.device)

    def set_up(self, slot: int, setup: SlotSetup) -> bool:
        """Set up a sequence in a slot. Idempotent.

        Returns whether the sequence has more than one end id and no beams.
        """
        more = () if setup.has_beams else setup.more_end_ids
        if not more and not len(self._ids):
            return False
        self._reserve()
        row = np.array([*more, *[NONE] * (COLUMNS - len(more))], np.int64)
        self._ids[slot] = self._state.send([row])[0]
        return bool(more)

    def end(self, tokens: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Return [r] bool: whether each token of `tokens` [r] is an end id of its sequence other than the first.

        A sequence has a list of end ids. This method does not compare the tokens with the first id of the list.
        """
        self._reserve()
        return (tokens[:, None] == self._ids[rows.device_slots]).any(1)

    def _reserve(self) -> None:
        before = self._ids
        if len(before) < self._state.capacity:
            self._ids = before.new_full((self._state.capacity, COLUMNS), NONE)
            self._ids[: len(before)] = before
