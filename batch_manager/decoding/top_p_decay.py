"""Top-p decay lowers top-p with each sampled token and resets it after the request's reset token.

    after the token top_p_reset_ids   top_p = its initial value
    after any other token             top_p = max(top_p * top_p_decay, top_p_min)

Source   Lee et al., "Factuality enhanced language models for open-ended text generation", 2022. The rule is
         TensorRT-LLM's. TensorRT-LLM applies it only without top-k; here top-k may be set too.
"""

import numpy as np
import torch

from ..handover import SlotSetup
from ..sampling_config import top_p_after
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage
from .position_ring import PositionRing
from .slots import SlotState


class TopPDecay(LogitsStage):
    """Sets each row's top-p for its next token. Does not change the logits.

    The value depends on the output alone. A resumed sequence and a step that runs twice therefore get the same value.

    _current   float32 on the device, by slot and position: the top-p for sampling the token at each position. `keep`
               writes the value for the next position
    """

    reads = ("top_p", "top_p_decay", "top_p_min", "top_p_reset_ids")

    def __init__(self, state: SlotState) -> None:
        self._state, self._columns = state, state.last_tokens.values.shape[1]
        self._current = PositionRing(
            torch.zeros((state.capacity, self._columns), dtype=torch.float32, device=state.device))

    def is_active(self, setup: SlotSetup) -> bool:
        sampling = setup.sampling
        return not setup.has_beams and sampling.top_p > 0 and (
            sampling.top_p_decay != 1 or sampling.top_p_min > sampling.top_p)

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        if self.is_active(setup):
            self._reserve()
            generated = setup.history[setup.prompt_length :]
            # `put` would copy the number to the device, and the host would wait for the copy.
            self._current.at(slot, len(setup.history)).fill_(float(
                top_p_after(generated, *(self._state.host[name][slot] for name in self.reads))))

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        self._reserve()
        top_p, decay, smallest, _ = rows.columns(self.reads)
        decays = (top_p > 0) & ((decay != 1) | (smallest > top_p))
        rows.replace("top_p", torch.where(decays, self._current.at(rows.device_slots, rows.device_positions), top_p))

    def keep(self, rows: LogitsRows, sampled: torch.Tensor) -> None:
        """Store the top-p for the tokens that follow `sampled` [r]."""
        self._reserve()
        slots, positions = rows.device_slots, rows.device_positions
        top_p, decay, smallest, reset_id = map(rows.column_as_set_up, self.reads)
        shrunk = (self._current.at(slots, positions) * decay).maximum(smallest)
        self._current.put(slots, positions + 1, torch.where(sampled == reset_id, top_p, shrunk))

    def _reserve(self) -> None:
        before = self._current.values
        if self._state.capacity > len(before):
            self._current.values = before.new_zeros((self._state.capacity, self._columns))
            self._current.values[: len(before)] = before
