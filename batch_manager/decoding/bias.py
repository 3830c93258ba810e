"""Embedding bias: a vector that is added to the logits."""

import numpy as np
import torch

from ..handover import SlotSetup
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage
from .slots import SlotState


class EmbeddingBias(LogitsStage):
    """Adds the `embedding_bias` of each request."""

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._biases: dict[int, torch.Tensor] = {}      # slot -> [vocab] float32

    def is_active(self, setup: SlotSetup) -> bool:
        return setup.embedding_bias is not None

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._biases.pop(slot, None)
        if setup.embedding_bias is not None:
            self._biases[slot] = self._state.send([setup.embedding_bias])[0]

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        biased = np.nonzero(active)[0]
        biases = [self._biases[slot] for slot in rows.slots[biased].tolist()]
        if logits.device.type == "cpu":
            for row, bias in zip(biased.tolist(), biases):
                logits[row] += bias
        else:                                           # two kernels for any number of rows
            logits.index_add_(0, *rows.send([biased]), torch.stack(biases))
