"""What a form that calls the model is made of: forwards and heads; and the forward of calls with padding."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ....attention.interface import Attention, PackedStep, RotaryTable
from ....models.registry import Model
from ...packing import ModelCall


class Forward(Protocol):
    """Computes the hidden states of a model call.

    dispatch   what computes: "triton", "compiled" or "torch"
    threads    number of threads that computed the newest call, for statistics; None: those of torch
    adapts     whether it adds the outputs of adapters
    """

    dispatch: str
    threads: int | None
    adapts: bool

    def plan(self, call: ModelCall) -> Sequence[np.ndarray]:
        """Return the arrays that `run` needs on the device besides those of every call."""
        ...

    def run(self, call: ModelCall, hidden: torch.Tensor, positions: torch.Tensor, tensors: Sequence[torch.Tensor]
            ) -> torch.Tensor:
        """Return the hidden states of the call's tokens, [T, hidden size]. Writes their entries of the KV cache pool.

        hidden      [T, hidden size]: embeddings; may be overwritten
        positions   [T] int64
        tensors     the arrays of `plan` on the device
        """
        ...


class Head(Protocol):
    """Computes logits. `largest` may be None: the head always stores all logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [r, vocab], float32 or in the dtype of the weights, for hidden [r, hidden size]."""
        ...

    def largest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each row without storing all logits.

        hidden    [r, hidden size]
        Returns   tokens [r] int64, the lowest id among equals; logits [r] float32, NaN where any logit is NaN
        """
        ...


class PaddedForward:
    """Runs calls with padding in the model's layers, and calls without padding in `unpadded`. See Forward.

    Attention and KV cache see the tokens only, and not the padding.
    """

    adapts = False

    def __init__(self, model: Model, attention: Attention, unpadded: Forward) -> None:
        self._model, self._attention, self._unpadded = model, attention, unpadded
        self.dispatch = unpadded.dispatch                # of most calls: generation rows have no padding

    @property
    def threads(self) -> int | None:
        return self._unpadded.threads

    def plan(self, call: ModelCall) -> Sequence[np.ndarray]:
        if call.padding is None:
            return self._unpadded.plan(call)
        return [call.padding.rows, *(self._attention.plan(call.step) or ())]

    def run(self, call: ModelCall, hidden: torch.Tensor, positions: torch.Tensor, tensors: Sequence[torch.Tensor]
            ) -> torch.Tensor:
        if call.padding is None:
            return self._unpadded.run(call, hidden, positions, tensors)
        rows, *planned = tensors
        if planned:
            self._attention.receive(planned)
        return forward_padded(self._model, hidden, positions, self._attention, rows, call.padding.num_rows)


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
