"""One call: arrays to the device, through the model, to the hidden states that are wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.interface import Attention, PackedStep
from ..decoding.logits_return import context_logits
from ..decoding.slots import CONTEXT_LOGITS, DrawRows, SlotState
from ..layers.recording import record_embedding
from ..models.registry import Model
from .compiled_step import CompiledStep
from .device import Uploads
from .fused_step import FusedStep
from .layouts import ModelCall
from .model_check import CheckedModel
from .padded_call import forward_padded


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one call yields.

    hidden           [r, hidden size]: the last hidden states of the sequences that draw a token
    rows             those sequences
    context_finite   [context tokens] bool: whether the hidden state of each context token is finite; None: no contexts
    context_logits   slot -> [chunk tokens, vocab] float32 on the host, for the slots that asked
    """

    hidden: torch.Tensor
    rows: DrawRows
    context_finite: torch.Tensor | None
    context_logits: dict[int, np.ndarray]


class ModelRunner:
    """Runs calls of one model over one pool.

    compiled   what runs the model's forward of a call without padding; None: torch does
    fused      what runs the model's forward of `generate` where there are few rows; None: its layers do
    table      [vocab, hidden size]: what the model embeds tokens with, where it does nothing but that; else None
    """

    def __init__(self, model: Model, attention: Attention, uploads: Uploads, vocab_size: int) -> None:
        self._model, self.attention, self._uploads = model, attention, uploads
        self._vocab_size, self._virtual_token_scale = vocab_size, getattr(model, "virtual_token_scale", 1)
        self.compiled: CompiledStep | None = None
        self.fused: FusedStep | None = None
        self.table = record_embedding(model.embed)

    @contextmanager
    def checking(self, hidden_size: int, dtype: torch.dtype) -> Iterator[None]:
        """Within it, results of the model are checked and ConfigError is raised for a wrong one; see CheckedModel."""
        model, self._model = self._model, CheckedModel(self._model, self._vocab_size, hidden_size, dtype)
        try:
            yield
        finally:
            self._model = model

    def run(self, call: ModelCall, state: SlotState, input_tokens: np.ndarray | None = None) -> CallResult:
        """Changes nothing but the pages that the step's tokens belong to.

        input_tokens   [g] int32, the first tokens of the sequences that generate, if there are any; None: they are the
                     ones that `state` drew last
        """
        step, padding = call.step, call.padding
        num_contexts = step.num_contexts - step.num_verifying
        num_context_tokens = int(step.query_starts[num_contexts]) if num_contexts else 0
        generates = len(step.slots) > num_contexts
        slots, drawn_at = step.slots, step.kv_lengths
        arrays = [step.token_ids.astype(np.int64), step.positions.astype(np.int64), slots.astype(np.int64),
                  drawn_at.astype(np.int64)]
        if generates and input_tokens is not None:
            arrays[0][num_context_tokens:] = input_tokens
        if step.num_contexts:                              # those draw a token whose last chunk this is
            drawing = np.searchsorted(step.query_starts, step.logits_rows, side="right") - 1
            slots, drawn_at = slots[drawing], step.positions[step.logits_rows] + np.int32(1)
            arrays += [step.logits_rows, slots.astype(np.int64), drawn_at.astype(np.int64)]
        if step.num_verifying:
            arrays.append(step.query_starts[num_contexts:-1].astype(np.int64))
        if call.embeddings is not None:
            virtual = np.nonzero(step.token_ids >= self._vocab_size)[0]
            arrays[0][virtual] = 0                                 # an id to look up; what is found is replaced
            arrays += [virtual, call.embeddings]
        if padding is not None:
            arrays.append(padding.rows)
        compiles = self.compiled is not None and padding is None
        planned = None if compiles else self.attention.plan(step)
        tensors = self._uploads.send(arrays if planned is None else [*arrays, *planned])
        if planned is not None:
            self.attention.receive(tensors[len(arrays):])
        token_ids, positions, device_slots, device_drawn_at, *more = tensors[:len(arrays)]

        generating_slots = device_slots[num_contexts:]
        if step.num_contexts:
            logits_rows, device_slots, device_drawn_at, *more = more
        if step.num_verifying:
            first_rows, *more = more
            token_ids[first_rows] = state.last_tokens.at(generating_slots, positions[first_rows])
        elif generates and input_tokens is None:
            token_ids[num_context_tokens:] = state.last_tokens.at(generating_slots, positions[num_context_tokens:])

        hidden = self._model.embed(token_ids)
        if call.embeddings is not None:
            places, embeddings, *more = more
            hidden.index_copy_(0, places, embeddings.to(hidden.dtype) * self._virtual_token_scale)
        if compiles:
            hidden = self.compiled.run(hidden, step)
        elif padding is None:
            hidden = self._model.forward(hidden, positions, self.attention)
        else:
            hidden = forward_padded(self._model, hidden, positions, self.attention, more[0], padding.num_rows)
        finite, returned_logits = None, {}
        if num_contexts:
            # A value that is not finite leaves its row's sum not finite.
            finite = hidden[:num_context_tokens].sum(1, dtype=torch.float32).isfinite()
            returned_logits = self._context_logits(step, num_contexts, hidden, state)
        if step.num_contexts and len(logits_rows) < len(hidden):
            hidden = hidden[logits_rows]
        return CallResult(hidden, DrawRows(slots, drawn_at, device_slots, device_drawn_at), finite, returned_logits)

    def generate(self, given: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [r, vocab] after one token a row, through an attention that was bound to their step.

        Shapes   as of `forward`
        """
        fused = self.fused
        if fused is None or len(given) > fused.most_rows:
            return self._model.logits(self.forward(given, positions))
        result = fused.run(self._embedded(given), positions, self.attention)
        return result if fused.gives_logits else self._model.logits(result)

    def forward(self, given: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [t, hidden size] of a step's tokens, through an attention that was bound to it.

        Shapes   given [t, hidden size], the rows of `table`; where there is none, the tokens [t] int64. positions [t]
                 int64 on the device
        """
        return self._model.forward(self._embedded(given), positions, self.attention)

    def _embedded(self, given: torch.Tensor) -> torch.Tensor:
        return self._model.embed(given) if self.table is None else given

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[r, hidden size] -> [r, vocab], float32 or in the dtype of the weights."""
        if self.compiled is not None and self.compiled.has_head:
            return self.compiled.logits(hidden)
        return self._model.logits(hidden)

    def largest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """[r, hidden size] -> (the token of each row's largest logit [r] int64, that logit [r] float32, NaN where one
        is), without a tensor of the logits; None: it takes one."""
        if self.compiled is not None and self.compiled.has_head:
            return self.compiled.largest(hidden)
        return None

    def _context_logits(self, step: PackedStep, num_contexts: int, hidden: torch.Tensor,
                        state: SlotState) -> dict[int, np.ndarray]:
        slots = step.slots[:num_contexts]
        return {int(slots[row]): context_logits(
                    self.logits, hidden[step.query_starts[row] : step.query_starts[row + 1]], self._vocab_size)
                for row in np.nonzero(state.active(CONTEXT_LOGITS, slots))[0].tolist()}


def join_rows(parts: list[DrawRows]) -> DrawRows:
    """The rows of several calls, in order."""
    if len(parts) == 1:
        return parts[0]
    return DrawRows(
        np.concatenate([part.slots for part in parts]), np.concatenate([part.positions for part in parts]),
        torch.cat([part.device_slots for part in parts]), torch.cat([part.device_positions for part in parts]))
