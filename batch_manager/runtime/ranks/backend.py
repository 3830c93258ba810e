"""The backend of one rank: its part of a model in the form `compiled` or `packed`.

Rank 0 draws the tokens, and tells the other ranks with each step which tokens its generating sequences continue with.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...decoding.decoder import GptDecoder
from ...decoding.logits_return import ROWS_AT_ONCE
from ...decoding.position_ring import PositionRing
from ...decoding.slots import CONTEXT_LOGITS, SlotState
from ...handover import GenerationWork, ScheduledBatch, StepOutput
from ...seams import PendingStep
from .. import packing
from ..block_tables import BlockTables
from ..device.running import finish_stream, on_device
from ..forms.form import Choice
from ..forms.packed.form import CallsForm
from ..forms.packed.forwards import Forward
from ..native_backend import NativeBackend
from ..packing import Divide, ModelCall
from .exchange import Exchange, Portion


class RankForward:
    """Runs the layers of this rank's part in another forward. See Forward.

    sends   whether to send the hidden states to the stage after, which `forward` does not do
    """

    def __init__(self, forward: Forward, exchange: Exchange, sends: bool) -> None:
        self._forward, self._exchange, self._sends = forward, exchange, sends
        self.dispatch, self.adapts, self.plan = forward.dispatch, forward.adapts, forward.plan

    @property
    def threads(self) -> int | None:
        return self._forward.threads

    def run(self, call: ModelCall, *given: Any) -> torch.Tensor:
        hidden = self._forward.run(call, *given)
        if self._sends:
            self._exchange.send(hidden)
        self._exchange.end_part()
        return hidden


class InputTokens:
    """The tokens with which the generating sequences of a step continue, as rank 0 has sent them.

    tokens   [g] int32: one for each generating sequence, or for each of its beams
    """

    def __init__(self) -> None:
        self.tokens = np.empty(0, np.int32)


class LayersForm(CallsForm):
    """A form of a rank that draws no tokens: the layers, and its part of the head, without sampling and results."""

    def __init__(self, inputs: InputTokens, splits_head: bool, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._inputs, self._splits_head = inputs, splits_head

    def start(self, batch: ScheduledBatch, traits: int) -> "RunLayers":
        hidden = [self._run(call, self._inputs.tokens, {}, {})[0]
                  for call in self._divide(batch, self._parts.tables, self._parts.tokens_per_block)]
        if self._splits_head and any(map(len, hidden)):
            self._head.logits(torch.cat(hidden))
        return RunLayers(batch.micro_batch_id, self._parts.stream)

    def _return_logits(self, *given: Any) -> None:
        if self._splits_head:
            super()._return_logits(*given)


class RunLayers:
    """A launched step of a LayersForm; see seams.PendingStep."""

    def __init__(self, micro_batch_id: int, stream: torch.Stream | None) -> None:
        self._micro_batch_id, self._stream = micro_batch_id, stream

    def finish(self) -> StepOutput:
        if self._stream is not None:
            self._stream.synchronize()
        return StepOutput.merge([], self._micro_batch_id)


def on_stage(divide: Divide, is_first: bool) -> Divide:
    """Return `divide` for a stage. Prompt-tuning embeddings replace rows of the first stage's embeddings alone."""
    if is_first:
        return divide

    def without_embeddings(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
        return [replace(call, embeddings=None) for call in divide(batch, tables, tokens_per_block)]
    return without_embeddings


def parts_of_step(batch: ScheduledBatch, divide: Divide, slots: SlotState, splits_head: bool) -> list[Portion]:
    """Return the parts of a step in order: each call of the layers, and the calls of a head that several ranks have.

    slots   tells which sequences want the logits of their contexts, unless this is the first chunk
    """
    first, *others = [Portion("layers", count) for count in rows_of_calls(batch, divide)]
    if not splits_head:
        return [first, *others]
    wanted = [len(work.token_ids) - work.num_drafts for work in batch.context
              if (slots.active(CONTEXT_LOGITS, np.array([work.slot]))[0] if work.setup is None
                  else work.setup.return_context_logits)]
    returned = [Portion("logits", min(count - start, ROWS_AT_ONCE))
                for count in wanted for start in range(0, count, ROWS_AT_ONCE)]
    drawn = sum(work.is_last_chunk * (1 + work.num_drafts) for work in batch.context) + rows_of_generation(batch)
    return [first, *returned, *others, *([Portion("logits", drawn)] if drawn else [])]


def rows_of_calls(batch: ScheduledBatch, divide: Divide) -> list[int]:
    """Return the number of rows of each call of the model in a step."""
    contexts, num_rows = batch.num_context_tokens, rows_of_generation(batch)
    return [contexts, num_rows] if divide is packing.split and contexts and num_rows else [contexts + num_rows]


def rows_of_generation(batch: ScheduledBatch) -> int:
    """Return the number of rows of the generating sequences of a step: one for each beam and each draft."""
    generation = batch.generation
    num_drafts = 0 if generation.draft_tokens is None else len(generation.draft_tokens)
    return len(generation) * generation.beam_width + num_drafts


def input_tokens(generation: GenerationWork, slots: SlotState, decoder: GptDecoder) -> np.ndarray:
    """Return the token with which each sequence, or each beam, continues, [g] int32. All earlier steps were read."""
    if generation.beam_width > 1:
        return decoder.searches.input_tokens(generation)
    ring = slots.last_tokens.values
    if ring.device.type == "cpu":
        return PositionRing(ring.numpy()).at(generation.slots, generation.kv_lengths).astype(np.int32)
    where = [torch.from_numpy(indices.astype(np.int64)).to(ring.device)
             for indices in (generation.slots, generation.kv_lengths)]
    return PositionRing(ring).at(*where).cpu().numpy().astype(np.int32)


class RankBackend(NativeBackend):
    """The backend of one rank: of rank 0 for parallel.leading, of another one for loop.follower.

    A step that raises here takes part in its exchanges all the same, so that no other rank waits for this one.

    divide      a function of packing.py, which divides a step into calls of the model
    exchange    what the ranks exchange in a step
    cleared     on rank 0: where its forms have cleared entries of the KV cache pool, which the other ranks clear before
                their next step. Later steps alone read or write them
    inputs      of the LayersForm of a rank that draws no tokens; None on rank 0
    splits_head   as for StagedModel

    choice      of every step: the first form serves every batch
    """

    def __init__(self, *given: Any, divide: Divide, exchange: Exchange, inputs: InputTokens | None,
                 splits_head: bool, cleared: list[np.ndarray]) -> None:
        super().__init__(*given)
        self._cleared = cleared
        self._divide, self._exchange, self._inputs, self._splits_head = divide, exchange, inputs, splits_head
        self.choice = Choice(next(iter(self._forms.steps)), ())

    def take_drawn(self, batch: ScheduledBatch) -> tuple[Any, ...]:
        """Return what the other ranks need for a step: the tokens with which its generating sequences continue, and
        where entries of the pool were cleared since the last step, if any were."""
        parts, drawn = self._parts, []
        if len(batch.generation):
            with on_device(parts.device, parts.stream), torch.inference_mode():
                drawn.append(input_tokens(batch.generation, parts.slots, parts.decoder))
        if self._cleared:
            drawn = [*(drawn or [np.empty(0, np.int32)]), np.concatenate(self._cleared)]
            self._cleared.clear()
        return tuple(drawn)

    def put_drawn(self, tokens: np.ndarray, cleared: np.ndarray | None = None) -> None:
        """Take the result of rank 0's `take_drawn`."""
        self._inputs.tokens = tokens
        if cleared is not None:
            self._parts.clear_entries(cleared)

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Launch a step; see seams.ModelBackend."""
        parts = self._parts
        with (on_device(parts.device, parts.stream), torch.inference_mode(),
              self._exchange.step(parts_of_step(batch, self._divide, parts.slots, self._splits_head))):
            return super().start(batch)

    def start_alike(self, batch: ScheduledBatch) -> PendingStep:
        """Launch a step that every rank launches by itself, whose sequences continue with token 0."""
        if self._inputs is not None:
            self._inputs.tokens = np.zeros(len(batch.generation) * batch.generation.beam_width, np.int32)
        return self.start(batch)

    def figures(self) -> Mapping[str, int]:
        if self._forms is None:
            return {}
        place, seconds = self._exchange.place, self._exchange.take_wait()
        return {**super().figures(), "Tensor Parallel Size": place.tensor_parallel_size,
                "Pipeline Parallel Size": place.pipeline_parallel_size,
                "Collective Wait Microseconds": round(seconds * 1e6)}

    def leave(self) -> None:
        """Close the connections to the other ranks. Idempotent."""
        self._exchange.close()

    def close(self) -> None:
        if self._forms is not None:
            finish_stream(self._parts.stream)
        super().close()
        self.leave()
