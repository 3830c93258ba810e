"""Runs one call of the model: uploads its arrays and returns the hidden states to sample from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.interface import Attention, PackedStep
from ..decoding.logits_return import context_logits
from ..decoding.slots import CONTEXT_LOGITS, SamplingRows, SlotState
from ..models.registry import Model
from .device.running import Uploads
from .forms.compiled.forward import CompiledStep
from .forms.packed.forwards import forward_padded
from .model_check import CheckedModel
from .packing import ModelCall


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of one call.

    hidden           [r, hidden size]: hidden states of the r rows to sample from
    rows             slots of these rows, and positions of the tokens to sample
    context_finite   [context tokens] bool: whether the hidden state of each context token is finite; None: no contexts
    context_logits   slot -> [chunk tokens, vocab] float32 on the host, for the slots that return context logits
    """

    hidden: torch.Tensor
    rows: SamplingRows
    context_finite: torch.Tensor | None
    context_logits: dict[int, np.ndarray]


class ModelRunner:
    """Runs model calls (`ModelCall`) of one model over one KV cache pool.

    compiled   runs the forward pass of model calls that have no padding; None: the model's layers run the forward pass
    """

    def __init__(self, model: Model, attention: Attention, uploads: Uploads, vocab_size: int) -> None:
        self._model, self.attention, self._uploads = model, attention, uploads
        self._vocab_size, self._prompt_tuning_scale = vocab_size, getattr(model, "prompt_tuning_scale", 1)
        self.compiled: CompiledStep | None = None

    @contextmanager
    def checking(self, hidden_size: int, dtype: torch.dtype) -> Iterator[CheckedModel]:
        """Context manager: check the model's results and raise ConfigError for a wrong result; see CheckedModel."""
        model, self._model = self._model, CheckedModel(self._model, self._vocab_size, hidden_size, dtype)
        try:
            yield self._model
        finally:
            self._model = model

    def run(self, call: ModelCall, state: SlotState, input_tokens: np.ndarray | None = None) -> CallResult:
        """Run a call of the model. Only the KV cache entries of the call's tokens change.

        input_tokens   [g] int32: input tokens of the generation rows; None: the newest tokens in `state`
        """
        step, padding = call.step, call.padding
        num_contexts = step.num_contexts - step.num_verifying
        num_context_tokens = int(step.query_starts[num_contexts]) if num_contexts else 0
        generates = len(step.slots) > num_contexts
        slots, sampled_positions = step.slots, step.kv_lengths
        arrays = [step.token_ids.astype(np.int64), step.positions.astype(np.int64), slots.astype(np.int64),
                  sampled_positions.astype(np.int64)]
        if generates and input_tokens is not None:
            arrays[0][num_context_tokens:] = input_tokens
        if step.num_contexts:                              # a context samples a token after its last chunk only
            sequences = np.searchsorted(step.query_starts, step.logits_rows, side="right") - 1
            slots, sampled_positions = slots[sequences], step.positions[step.logits_rows] + np.int32(1)
            arrays += [step.logits_rows, slots.astype(np.int64), sampled_positions.astype(np.int64)]
        if step.num_verifying:
            arrays.append(step.query_starts[num_contexts:-1].astype(np.int64))
        if call.embeddings is not None:
            prompt_tuning_rows = np.nonzero(step.token_ids >= self._vocab_size)[0]
            arrays[0][prompt_tuning_rows] = 0                      # any valid id; the embedding is replaced below
            arrays += [prompt_tuning_rows, call.embeddings]
        if padding is not None:
            arrays.append(padding.rows)
        compiles = self.compiled is not None and padding is None
        planned = None if compiles else self.attention.plan(step)
        tensors = self._uploads.send(arrays if planned is None else [*arrays, *planned])
        if planned is not None:
            self.attention.receive(tensors[len(arrays):])
        token_ids, positions, device_slots, device_sampled_positions, *more = tensors[:len(arrays)]

        generating_slots = device_slots[num_contexts:]
        if step.num_contexts:
            logits_rows, device_slots, device_sampled_positions, *more = more
        if step.num_verifying:
            first_rows, *more = more
            token_ids[first_rows] = state.last_tokens.at(generating_slots, positions[first_rows])
        elif generates and input_tokens is None:
            token_ids[num_context_tokens:] = state.last_tokens.at(generating_slots, positions[num_context_tokens:])

        hidden = self._model.embed(token_ids)
        if call.embeddings is not None:
            device_rows, embeddings, *more = more
            hidden.index_copy_(0, device_rows, embeddings.to(hidden.dtype) * self._prompt_tuning_scale)
        if compiles:
            hidden = self.compiled.run(hidden, step)
        elif padding is None:
            hidden = self._model.forward(hidden, positions, self.attention)
        else:
            hidden = forward_padded(self._model, hidden, positions, self.attention, more[0], padding.num_rows)
        finite, returned_logits = None, {}
        if num_contexts:
            # The sum of a row is not finite if any of its values is not.
            finite = hidden[:num_context_tokens].sum(1, dtype=torch.float32).isfinite()
            returned_logits = self._context_logits(step, num_contexts, hidden, state)
        if step.num_contexts and len(logits_rows) < len(hidden):
            hidden = hidden[logits_rows]
        rows = SamplingRows(slots, sampled_positions, device_slots, device_sampled_positions)
        return CallResult(hidden, rows, finite, returned_logits)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [r, vocab], float32 or in the dtype of the weights, for hidden [r, hidden size]."""
        if self.compiled is not None and self.compiled.has_head:
            return self.compiled.logits(hidden)
        return self._model.logits(hidden)

    def largest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the largest logit of each row without storing all logits, or None if the head is not compiled.

        hidden    [r, hidden size]
        Returns   tokens [r] int64; logits [r] float32, NaN where any logit is NaN
        """
        if self.compiled is not None and self.compiled.has_head:
            return self.compiled.largest(hidden)
        return None

    def _context_logits(self, step: PackedStep, num_contexts: int, hidden: torch.Tensor,
                        state: SlotState) -> dict[int, np.ndarray]:
        slots = step.slots[:num_contexts]
        return {int(slots[row]): context_logits(
                    self.logits, hidden[step.query_starts[row] : step.query_starts[row + 1]], self._vocab_size)
                for row in np.nonzero(state.active(CONTEXT_LOGITS, slots))[0].tolist()}


def join_rows(parts: list[SamplingRows]) -> SamplingRows:
    """Concatenate the sampling rows of several calls, in order."""
    if len(parts) == 1:
        return parts[0]
    return SamplingRows(
        np.concatenate([part.slots for part in parts]), np.concatenate([part.positions for part in parts]),
        torch.cat([part.device_slots for part in parts]), torch.cat([part.device_positions for part in parts]))
