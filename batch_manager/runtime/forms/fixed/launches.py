"""Launches everything that a step at fixed addresses computes, from its inputs to its results."""

import torch

from ....models.registry import Model
from ....triton_kernels import dispatch
from ...parts import DeviceParts
from .fused import FusedBody
from .inputs import FixedInputs
from .shapes import Shape


class Launches:
    """Launches steps of a model. The shape of a step determines all launches, so that a graph can replay them.

    table   [vocab, hidden size]: the embedding table, if the model's `embed` is a plain lookup; None: `embed` is called
    fused   computes generation steps of up to `fused.most_rows` rows; None: the model's layers compute all steps
    """

    def __init__(self, parts: DeviceParts, inputs: FixedInputs, model: Model, table: torch.Tensor | None,
                 fused: FusedBody | None = None) -> None:
        self._parts, self._inputs, self._model, self._table, self._fused = parts, inputs, model, table, fused
        self._prepare_step = dispatch.kernel("prepare_step", parts.device)

    def launch(self, shape: Shape) -> None:
        """Launch a step whose inputs were sent."""
        model, fused, attention, decoder = self._model, self._fused, self._parts.attention, self._parts.decoder
        given = self._inputs.of(shape)
        tensors, positions = given.tensors, given.tensors["positions"]
        counts = decoder.plain_counts(shape.num_sampled) if shape.samples else None
        hidden = self._prepare_step(
            self._inputs.block_tables, tensors["table_entries"], tensors["table_blocks"],
            decoder.state.last_tokens.values, tensors["slots"][: shape.rows], positions, tensors["token_ids"],
            embedding=self._table, cleared=counts)
        if self._table is None:
            hidden = model.embed(hidden)                # until here these are the tokens
        attention.bind(given.generation, given.contexts)
        if fused is not None and not shape.contexts and not shape.adapts and shape.rows <= fused.most_rows:
            hidden = fused.run(hidden, positions, attention)
            logits = hidden if fused.gives_logits else model.logits(hidden)
        else:
            if shape.adapts:
                with self._parts.adapters.at_fixed_addresses(tensors["adapter_tiles"]):
                    hidden = model.forward(hidden, positions, attention)
            else:
                hidden = model.forward(hidden, positions, attention)
            if shape.contexts:
                # The sum of a row is not finite if any of its values is not.
                torch.sum(hidden[shape.rows :], 1, dtype=torch.float32, out=given.context_sums)
                hidden = hidden.index_select(0, tensors["logits_rows"])
            logits = model.logits(hidden)
        decoder.sample_plain(logits, tensors["slots"], tensors["kv_lengths"], counts, given.results)
