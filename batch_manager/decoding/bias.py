"""A number added to every token's logit."""

import torch

from ..handover import SlotSetup
from .slot_table import SlotTable
from .slots import DrawRows


class EmbeddingBias:
    """The bias a request came with. A LogitsStage."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._table = SlotTable(num_slots, device)
        self._biases: dict[int, torch.Tensor] = {}      # slot -> [vocab] float32

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._biases.pop(slot, None)
        self._table.put(slot, setup.embedding_bias is not None)
        if setup.embedding_bias is not None:
            self._biases[slot] = torch.from_numpy(setup.embedding_bias).to(self._device)

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._table.is_wanted(rows)

    def apply(self, logits: torch.Tensor, rows: DrawRows) -> None:
        biased = self._table.indices(rows)
        biases = [self._biases[slot] for slot in rows.slots[biased].tolist()]
        if logits.device.type == "cpu":
            for row, bias in zip(biased.tolist(), biases):
                logits[row] += bias
        else:                                           # two kernels, whatever the number of rows
            logits.index_add_(0, torch.from_numpy(biased).to(logits.device), torch.stack(biases))
