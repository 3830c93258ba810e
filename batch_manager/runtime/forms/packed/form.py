"""Steps as calls of the model: the forms `compiled`, `packed` and `padded`, which differ in how a call is computed.

The forward of the layers is here, and not in forwards.py: it is on the path of every step.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ....attention.interface import Attention, PackedStep
from ....decoding.acceptance import UNVERIFIED, RatioRows, SpoiltDraftsError, accepted
from ....decoding.decoder import READS_LOGITS
from ....decoding.logits_return import context_logits
from ....decoding.sampled_step import UNUSABLE, SampledStep
from ....decoding.slots import (
    ADAPTER,
    BEAMS,
    CONTEXT_LOGITS,
    GENERATION_LOGITS,
    HISTORY,
    LOG_PROBS,
    MORE_END_IDS,
    POST_PROCESSED,
    RAW_LOG_PROBS,
    SAMPLES,
    STAGES,
    STOP_WORDS,
    TOP_LOG_PROBS,
    SamplingRows,
)
from ....handover import RowFailure, ScheduledBatch, StepOutput
from ....models.registry import Model
from ...adapters.port import LoraPort
from ...device.running import Readback
from ...packing import Divide, ModelCall, slots_not_finite
from ...parts import DeviceParts
from ..form import CONTEXT_DRAFTS, CONTEXTS, DRAFTS, EMBEDDINGS, PADDING
from .forwards import Forward, Head

# What a form of calls serves, each bit by its name: a bit that is new is refused until a form lists it.
CALLS = (STAGES | SAMPLES | LOG_PROBS | CONTEXT_LOGITS | GENERATION_LOGITS | HISTORY | STOP_WORDS | BEAMS |
         POST_PROCESSED | MORE_END_IDS | TOP_LOG_PROBS | RAW_LOG_PROBS | CONTEXTS | EMBEDDINGS)
VERIFIES = DRAFTS | CONTEXT_DRAFTS
SERVES = {"compiled": CALLS | ADAPTER | VERIFIES, "packed": CALLS | ADAPTER | VERIFIES, "padded": CALLS | PADDING}

# Fields of PackedStep that each call uploads -> dtype on the device. Arrays of attention come from `Forward.plan`.
UPLOADED: Mapping[str, type[np.signedinteger]] = {"token_ids": np.int64, "positions": np.int64, "slots": np.int64}


class LayersForward:
    """Runs the model's layers one by one, over an attention. See Forward.

    port   the adapters of the layers; None: they have none
    """

    threads = None

    def __init__(self, model: Model, attention: Attention, port: LoraPort | None = None) -> None:
        self._model, self._attention, self.dispatch = model, attention, attention.dispatch
        self._port, self.adapts = port, port is not None

    def plan(self, call: ModelCall) -> Sequence[np.ndarray]:
        planned = self._attention.plan(call.step) or ()
        return planned if self._port is None else [*planned, *self._port.plan(call.step)]

    def run(self, call: ModelCall, hidden: torch.Tensor, positions: torch.Tensor, tensors: Sequence[torch.Tensor]
            ) -> torch.Tensor:
        own = len(tensors) - (0 if self._port is None else self._port.num_planned)
        if own:
            self._attention.receive(tensors[:own])
        if self._port is None:
            return self._model.forward(hidden, positions, self._attention)
        self._port.receive(tensors[own:])
        with self._port.active():
            return self._model.forward(hidden, positions, self._attention)


class LayersHead:
    """The model's own head. See Head."""

    largest = None

    def __init__(self, model: Model) -> None:
        self.logits = model.logits


class CallsForm:
    """A StepForm that computes a step in one or two calls of the model. Each kind of batch is served.

    name      "compiled", "packed" or "padded"
    model     makes embeddings
    forward   computes hidden states
    head      computes logits
    divide    a function of packing.py, which divides a batch into calls
    threads   threads of torch in a step on a CPU; None: the engine's number
    clear     clears entries of the KV cache pool; None: those of this process
    """

    def __init__(self, name: str, parts: DeviceParts, model: Model, forward: Forward, head: Head, divide: Divide, *,
                 threads: int | None = None, clear: Callable[[np.ndarray], None] | None = None) -> None:
        self.name, self.dispatch, self.threads = name, forward.dispatch, threads
        self.serves = SERVES[name] if forward.adapts else SERVES[name] & ~ADAPTER
        self._parts, self._decoder, self._model, self._divide = parts, parts.decoder, model, divide
        self._forward, self._head = forward, head
        self._clear = clear or parts.clear_entries
        self._prompt_tuning_scale = getattr(model, "prompt_tuning_scale", 1)

    def misfit(self, batch: ScheduledBatch) -> int:
        if not batch.context and batch.generation.num_drafts is None or not batch.has_drafts:
            return 0
        counts, _ = drafts_of(batch)
        return DRAFTS * bool(self._parts.slots.active(UNVERIFIED, batch.yielding[counts > 0]).any())

    def start(self, batch: ScheduledBatch, traits: int) -> "PendingCalls":
        input_tokens = None
        if batch.generation.beam_width > 1:
            input_tokens = self._decoder.searches.input_tokens(batch.generation)
        returned, tensors, sampled = {}, {}, None
        parts, parts_of_rows, written = [], [], []
        for call in self._divide(batch, self._parts.tables, self._parts.tokens_per_block):
            hidden, rows = self._run(call, input_tokens, tensors, returned)
            parts.append(hidden)
            parts_of_rows.append(rows)
            if traits & VERIFIES:
                written.append(call.step.pool_slots[call.step.logits_rows])
        if len(parts) > 1:
            hidden, rows = torch.cat(parts), join_rows(parts_of_rows)
        if len(rows.slots):
            drafts = drafts_of(batch) if traits & VERIFIES else None
            if drafts is not None:
                self._decoder.assume(rows, *drafts)
            if self._head.largest is None or traits & READS_LOGITS:
                ratio = self._ratio_rows(batch) if traits & CONTEXT_DRAFTS else None
                sampled = self._decoder.sample(self._head.logits(hidden), rows, ratio, drafts)
            else:
                sampled = self._decoder.sample_largest(*self._head.largest(hidden), rows)
            tensors |= sampled.tensors()
        readback = self._parts.readbacks.start(tensors)
        if sampled is not None:
            self._decoder.keep(sampled)
        return PendingCalls(batch, self._parts, sampled, readback, returned, written, self._clear)

    def _ratio_rows(self, batch: ScheduledBatch) -> RatioRows | None:
        """Return the sampled rows whose drafts a client brought with logits; None if there are none."""
        rows, drafts, logits, first = [], [], [], 0
        for work in batch.context:
            if work.draft_logits is not None:
                rows.append(np.arange(first, first + work.num_drafts, dtype=np.int64))
                drafts.append(work.token_ids[-work.num_drafts:].astype(np.int64))
                logits.append(work.draft_logits)
            first += work.is_last_chunk * (1 + work.num_drafts)
        if not rows:
            return None
        return RatioRows(np.concatenate(rows), *self._parts.uploads.send([np.concatenate(drafts),
                                                                          np.concatenate(logits)]))

    def _run(self, call: ModelCall, input_tokens: np.ndarray | None, tensors: dict[str, torch.Tensor],
             returned: dict[int, np.ndarray]) -> tuple[torch.Tensor, SamplingRows]:
        """Run a call. Returns hidden states [r, hidden size] of the r rows to sample from, and these rows.

        input_tokens   [g] int32: input tokens of the generation rows; None: the newest tokens in the slots
        Mutates        tensors, with `context_finite` [context tokens] bool if the call has contexts: whether the hidden
                       state of each context token is finite; returned, with the context logits of slots that want them
        """
        step, slots = call.step, self._parts.slots
        num_contexts = step.num_contexts - step.num_verifying
        num_context_tokens = int(step.query_starts[num_contexts]) if num_contexts else 0
        generates = len(step.slots) > num_contexts
        sampled_slots, sampled_positions = step.slots, step.kv_lengths
        arrays = {}
        for name, dtype in UPLOADED.items():
            arrays[name] = getattr(step, name).astype(dtype)
        newest = step.query_starts[num_contexts:-1].astype(np.int64)   # rows of the newest tokens, which drafts follow
        if generates and input_tokens is not None:
            arrays["token_ids"][newest] = input_tokens
        if step.num_contexts:                              # a context samples a token after its last chunk only
            sequences = np.searchsorted(step.query_starts, step.logits_rows, side="right") - 1
            sampled_slots = step.slots[sequences]
            sampled_positions = step.positions[step.logits_rows] + np.int32(1)
            arrays |= {"logits_rows": step.logits_rows, "sampled_slots": sampled_slots.astype(np.int64)}
        arrays["sampled_positions"] = sampled_positions.astype(np.int64)
        if step.num_verifying:
            arrays["newest"] = newest
        if call.embeddings is not None:
            arrays["embedded_rows"] = np.nonzero(step.token_ids >= self._parts.vocab_size)[0]
            arrays["token_ids"][arrays["embedded_rows"]] = 0       # any valid id; the embedding is replaced below
            arrays["embeddings"] = call.embeddings
        sent = self._parts.uploads.send([*arrays.values(), *self._forward.plan(call)])
        given = dict(zip(arrays, sent))

        token_ids, positions, generating = given["token_ids"], given["positions"], given["slots"][num_contexts:]
        if generates and input_tokens is None:
            rows = given.get("newest", slice(num_context_tokens, None))
            token_ids[rows] = slots.last_tokens.at(generating, positions[rows])
        hidden = self._model.embed(token_ids)
        if call.embeddings is not None:
            hidden.index_copy_(0, given["embedded_rows"],
                               given["embeddings"].to(hidden.dtype) * self._prompt_tuning_scale)
        hidden = self._forward.run(call, hidden, positions, sent[len(arrays):])
        if num_contexts:
            # The sum of a row is not finite if any of its values is not.
            tensors["context_finite"] = hidden[:num_context_tokens].sum(1, dtype=torch.float32).isfinite()
            self._return_logits(step, num_contexts, hidden, returned)
        if step.num_contexts and len(step.logits_rows) < len(hidden):
            hidden = hidden[given["logits_rows"]]
        return hidden, SamplingRows(sampled_slots, sampled_positions, given.get("sampled_slots", given["slots"]),
                                    given["sampled_positions"])

    def _return_logits(self, step: PackedStep, num_contexts: int, hidden: torch.Tensor,
                       returned: dict[int, np.ndarray]) -> None:
        slots = step.slots[:num_contexts]
        for row in np.nonzero(self._parts.slots.active(CONTEXT_LOGITS, slots))[0].tolist():
            start, end = step.query_starts[row : row + 2].tolist()
            num_rows = np.count_nonzero((step.logits_rows >= start) & (step.logits_rows < end))
            part = hidden[start : end - max(num_rows - 1, 0)]               # without its drafts
            returned[int(slots[row])] = context_logits(self._head.logits, part, self._parts.vocab_size)

    def figures(self) -> dict[str, int]:
        if self._parts.device.type != "cpu":
            return {}
        return {"Compute Threads": self._forward.threads or self._parts.num_threads or torch.get_num_threads()}

    def close(self) -> None:
        pass


def drafts_of(batch: ScheduledBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return ([n] drafts of each sequence that gets tokens, [their sum] the draft tokens)."""
    last, generation = [work for work in batch.context if work.is_last_chunk], batch.generation
    counts, tokens = [np.array([work.num_drafts for work in last], np.int32)], [
        work.token_ids[-work.num_drafts:] for work in last if work.num_drafts]
    counts.append(np.zeros(len(generation), np.int32) if generation.num_drafts is None else generation.num_drafts)
    if generation.draft_tokens is not None:
        tokens.append(generation.draft_tokens)
    return np.concatenate(counts), np.concatenate(tokens)


def join_rows(parts: Sequence[SamplingRows]) -> SamplingRows:
    """Concatenate the sampling rows of several calls, in order."""
    return SamplingRows(
        np.concatenate([part.slots for part in parts]), np.concatenate([part.positions for part in parts]),
        torch.cat([part.device_slots for part in parts]), torch.cat([part.device_positions for part in parts]))


class PendingCalls:
    """A launched step of a CallsForm; see seams.PendingStep.

    sampled    the result of sampling; None: no token is sampled
    returned   slot -> context logits [chunk tokens, vocab] float32 on the host
    written    with drafts: where the inputs of the sampled rows are in the KV cache pool, as PackedStep.pool_slots, for
               each call
    clear      clears entries of the pool
    """

    def __init__(self, batch: ScheduledBatch, parts: DeviceParts, sampled: SampledStep | None, readback: Readback,
                 returned: dict[int, np.ndarray], written: Sequence[np.ndarray],
                 clear: Callable[[np.ndarray], None]) -> None:
        self._batch, self._parts, self._written, self._clear_entries = batch, parts, written, clear
        self._sampled, self._readback, self._returned = sampled, readback, returned

    def finish(self) -> StepOutput:
        arrays = self._readback.wait()
        if self._written and self._sampled is not None:
            arrays = self._sampled.with_usable_rows(arrays)
            self._check_drafts(arrays)
        failures: dict[int, RowFailure] = {}
        if self._batch.context and not arrays["context_finite"].all():
            failures = dict.fromkeys(slots_not_finite(self._batch.context, arrays["context_finite"]), UNUSABLE)
        if self._sampled is None:
            none = np.empty(0, np.int32)
            return StepOutput(self._batch.micro_batch_id, none, none, np.empty(0, np.uint8),
                              context_logits=self._returned, failures=failures)
        return StepOutput(self._batch.micro_batch_id, **self._sampled.output(
            arrays, failures, self._parts.vocab_size, *self._accepted(arrays)), context_logits=self._returned)

    def _accepted(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return the result of `accepted` for a step with drafts, else nothing.

        NaN that a rejected draft left in the KV cache is cleared: attention multiplies what it masks by 0.
        """
        if not self._written:
            return ()
        is_new, num_new = accepted(arrays, *drafts_of(self._batch))
        if not arrays["finite"].all():
            self._clear(~(is_new | (arrays["finite"] != 0)))
        return is_new, num_new

    def _check_drafts(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise SpoiltDraftsError if a row before the drafts of a sequence is not finite.

        The drafts can be why: attention multiplies the values of the rows after a row by 0, and 0 * NaN is NaN.
        """
        counts, _ = drafts_of(self._batch)
        first_rows = np.cumsum(1 + counts) - (1 + counts)
        drafting = [work.slot for work in self._batch.context if work.num_drafts]
        if arrays["finite"][first_rows[counts > 0]].all() and not (drafting and set(drafting).intersection(
                slots_not_finite(self._batch.context, arrays["context_finite"]))):
            return
        is_draft = np.ones(len(arrays["finite"]), bool)
        is_draft[first_rows] = False
        self._clear(is_draft)
        raise SpoiltDraftsError

    def _clear(self, rows: np.ndarray) -> None:
        """Clear the KV cache entries of the inputs of these sampled rows, [r] bool."""
        self._clear_entries(np.concatenate(self._written)[rows])
