"""Repetition, presence and frequency penalties."""

import numpy as np
import torch

from ..handover import SlotSetup
from ..triton_kernels import dispatch
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage


class TokenPenalties(LogitsStage):
    """Lowers the logits of tokens that occur in prompt or output, with the operation `token_penalties`.

    A repetition penalty below 1, or a negative presence or frequency penalty, raises these logits.

    Presence and frequency penalties ignore the first `prompt_ignore_length` tokens of the prompt, at most the whole
    prompt.
    """

    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    reads = (*penalties, "prompt_ignore_length", "prompt_length")

    def __init__(self, device: torch.device) -> None:
        self._token_penalties = dispatch.kernel("token_penalties", device)

    def is_active(self, setup: SlotSetup) -> bool:
        return setup.sampling.sets(self.penalties)

    def needs_history(self, setup: SlotSetup) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        self._token_penalties(logits, *rows.history(), *rows.columns(self.penalties),
                              rows.column("prompt_ignore_length").minimum(rows.column("prompt_length")))
