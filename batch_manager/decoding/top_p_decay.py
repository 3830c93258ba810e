"""A top-p that shrinks while a sequence is written, and starts anew behind a certain token.

    after each token that was drawn    top_p = max(top_p * decay, min), or what it was at first, behind the reset id

Source   Lee et al., "Factuality enhanced language models for open-ended text generation", 2022; the rule is that of
         TensorRT-LLM. There it goes with top-p alone; here top-k may stand beside it.
"""

import numpy as np
import torch

from ..handover import SlotSetup
from .position_ring import COLUMNS, PositionRing
from .slot_table import SlotTable
from .slots import DrawRows, decays


class TopPDecay:
    """The top-p of every draw, a function of what was generated: a resumed sequence and a step that runs twice get the
    same.

    _current   float32 on the device, by position: what the draw at a position uses; the draw writes the next one
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._table = SlotTable(num_slots, device, decays=np.bool_(False), first=np.float32(0), decay=np.float32(1),
                                floor=np.float32(0), reset_id=np.int32(-1))
        self._current = PositionRing(torch.zeros((num_slots, COLUMNS), dtype=torch.float32, device=device))

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._table.put(slot, decays(setup), decays=True, first=setup.sampling.top_p,
                        decay=setup.sampling.top_p_decay, floor=setup.sampling.top_p_min,
                        reset_id=setup.sampling.top_p_reset_ids)
        if not decays(setup):
            return
        self._reserve(slot + 1)
        generated, sampling = setup.history[setup.prompt_length :], setup.sampling
        self._current.put(slot, len(setup.history), float(
            top_p_behind(
            generated, sampling.top_p, sampling.top_p_decay, sampling.top_p_min, sampling.top_p_reset_ids)))

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._table.is_wanted(rows)

    def top_p(self, rows: DrawRows, unchanging: torch.Tensor) -> torch.Tensor:
        """[r] float32: what these draws use. unchanging [r]: the top-p of the rows where it does not change."""
        self._reserve(int(rows.slots.max()) + 1)
        current = self._current.at(rows.device_slots, rows.device_positions)
        return torch.where(self._table.column("decays", rows), current, unchanging)

    def keep(self, rows: DrawRows, drawn: torch.Tensor) -> None:
        """The draws behind these tokens use what they make of it. drawn [r]"""
        if not self.is_wanted(rows):
            return
        slots, positions, column = rows.device_slots, rows.device_positions, self._table.column
        self._reserve(int(rows.slots.max()) + 1)
        shrunk = (self._current.at(slots, positions) * column("decay", rows)).maximum(column("floor", rows))
        self._current.put(slots, positions + 1,
                          torch.where(drawn == column("reset_id", rows), column("first", rows), shrunk))

    def _reserve(self, num_slots: int) -> None:
        before = self._current.values
        if num_slots > len(before):
            self._current.values = before.new_zeros((max(2 * len(before), num_slots), COLUMNS))
            self._current.values[: len(before)] = before


def top_p_behind(generated: np.ndarray, first: float, decay: float, floor: float, reset_id: int) -> np.float32:
    """The top-p of the draw behind the tokens `generated` [n], in the float32 steps in which it is reached."""
    resets = np.nonzero(generated == reset_id)[0]
    steps = len(generated) - (resets[-1] + 1 if len(resets) else 0)
    top_p, decay, floor = np.float32(first), np.float32(decay), np.float32(floor)
    for _ in range(steps):
        before, top_p = top_p, max(top_p * decay, floor)
        if top_p == before:
            break
    return top_p
