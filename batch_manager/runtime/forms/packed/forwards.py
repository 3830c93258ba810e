"""Padded calls of a model. Attention and KV cache see the packed tokens only."""

from collections.abc import Sequence

import numpy as np
import torch

from ....attention.interface import Attention, PackedStep, RotaryTable
from ....models.registry import Model


class PaddedAttention:
    """Wraps an attention for padded calls.

    The attention gets only the rows that hold tokens. It does not get the padding rows, so they are neither written
    to the KV cache nor attended to. The results of padding rows are zeros.
    """

    def __init__(self, attention: Attention, rows: torch.Tensor, num_rows: int) -> None:
        self.dispatch = attention.dispatch
        self._attention, self._rows, self._num_rows = attention, rows, num_rows

    def plan(self, step: PackedStep) -> Sequence[np.ndarray] | None:
        return self._attention.plan(step)

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        self._attention.receive(tensors)

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            rotary: RotaryTable | None, sink_logits: torch.Tensor | None = None) -> torch.Tensor:
        rows, more = self._rows, {} if sink_logits is None else {"sink_logits": sink_logits}
        attended = self._attention.run(layer, query[rows], key[rows], value[rows], rotary, **more)
        return self._spread(attended)

    def _spread(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.new_zeros((self._num_rows, *packed.shape[1:])).index_copy_(0, self._rows, packed)


def forward_padded(model: Model, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention,
                   rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Run `model.forward` on packed tokens, padded to `num_rows` rows.

    Returns the hidden states of the packed tokens.

    rows     row of each packed token among the `num_rows` rows
    Shapes   hidden and the result [T, hidden size]; positions, rows [T]
    """
    # The results of the padding rows, which start as zeros, are dropped.
    padded = hidden.new_zeros((num_rows, hidden.shape[1])).index_copy_(0, rows, hidden)
    padded_positions = positions.new_zeros(num_rows).index_copy_(0, rows, positions)
    return model.forward(padded, padded_positions, PaddedAttention(attention, rows, num_rows))[rows]
