"""End ids of a sequence beyond its first one, which is a number of the slot. Few sequences have any."""

import torch

from ..handover import SlotSetup
from .logits_rows import LogitsRows
from .slots import SlotState

COLUMNS = 7                        # a sequence has at most 8 end ids
NONE = -1                          # no token's id


class MoreEndIds:
    """Which tokens end a sequence beside its first end id. The bit MORE_END_IDS of `SlotState.features` says who has
    any; beams do not count, for their search looks at the end ids itself.

    _ids   [slots, COLUMNS] int64 on the device, filled up with NONE; no rows before a sequence needs one
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._ids = torch.empty((0, COLUMNS), dtype=torch.int64, device=state.device)

    def set_up(self, slot: int, setup: SlotSetup) -> bool:
        """A sequence takes the slot. True when it has more than one end id. Doing so again is harmless."""
        more = () if setup.has_beams else setup.more_end_ids
        if not more and not len(self._ids):
            return False
        self._reserve()
        row = [*more, *[NONE] * (COLUMNS - len(more))]
        self._ids[slot] = torch.tensor(row, dtype=torch.int64, device="cpu").to(self._state.device)
        return bool(more)

    def end(self, tokens: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """[r] bool: which of `tokens` [r] are among these ids of their sequences."""
        self._reserve()
        return (tokens[:, None] == self._ids[rows.device_slots]).any(1)

    def _reserve(self) -> None:
        before = self._ids
        if len(before) < self._state.capacity:
            self._ids = before.new_full((self._state.capacity, COLUMNS), NONE)
            self._ids[: len(before)] = before
