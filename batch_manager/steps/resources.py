"""The resources that a request needs to run: KV cache blocks, and the setup of its slot on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

import numpy as np

from ..handover import (
    NO_GENERATION,
    NO_UPDATES,
    BlockClear,
    ContextWork,
    DeviceOperation,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from ..kv.claims import Claim
from ..kv.kv_cache_manager import ContextDrafts, KvCacheManager
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..requests.prompt_table import PromptTable
from ..scheduling.chunking import chunk_after_reuse
from ..scheduling.contract import context_drafts
from ..scheduling.interfaces import SchedulerOutput
from .device_work import DeviceWork

DRAFT_LEN = attrgetter("draft_len")


class Resource(Protocol):
    """A resource that a request holds, besides KV cache blocks, from its first step to its end or a pause.

    kv.PeftCacheManager is an example. The scheduler must plan within the limits of the resource. A resource may also
    have `fit(plan)`, which is called with each plan before its claim, and may propose drafts for generating requests;
    `awaits(request)`, whether the next step of a request in flight has to wait for this one; `memory_usage()`, the
    memory that it takes beside the backend's; and `close()`, called after the last request.
    """

    def claim(self, requests: Sequence[LlmRequest]) -> Sequence[DeviceOperation]:
        """Claim everything that these requests need, or nothing. The requests hold none of the resource yet.

        Returns the operations that the device must run before the step of these requests. Raises OutOfResourceError,
        with nothing changed, if too little of the resource is free.
        """
        ...

    def release(self, request: LlmRequest) -> None:
        """Release everything that the request holds of the resource."""
        ...

    def set_up(self, request: LlmRequest, setup: SlotSetup) -> SlotSetup:
        """Return the setup of the request's slot with what the device must know of the resource, after the claim."""
        ...

    def figures(self) -> Mapping[str, int | str]:
        """Return the current statistics of the resource: name in the record -> value. The names never change."""
        ...


class Resources:
    """Claims resources for a plan, and releases them on a pause and at the end of a request. Release is idempotent.

    others        resources besides blocks: claimed in the order given, before blocks, and released in reverse order
    device_work   the device work caused by claims, releases and beams; the device does it before the next step
    """

    def __init__(self, kv_cache_manager: KvCacheManager, max_seq_len: int, others: Sequence[Resource] = ()) -> None:
        self.others = tuple(others)
        self._fits, self._awaits = ([method for resource in others if (method := getattr(resource, name, None))]
                                    for name in ("fit", "awaits"))
        self.device_work = DeviceWork()
        self._kv = kv_cache_manager
        self._max_seq_len = max_seq_len
        self._takes_drafts = kv_cache_manager.window.max_draft_len > 0
        self._setups: dict[int, SlotSetup] = {}
        self._prompt_tables: dict[int, PromptTable] = {}
        self._draft_logits: dict[int, np.ndarray] = {}

    def admit(self, admitted: Admitted) -> None:
        """Store the slot setup of a request, for its start on the device, its prompt-tuning table and draft logits."""
        request_id = admitted.request.request_id
        self._setups[request_id] = admitted.setup
        if admitted.prompt_table is not None:
            self._prompt_tables[request_id] = admitted.prompt_table
        if admitted.draft_logits is not None:
            self._draft_logits[request_id] = admitted.draft_logits

    def pause(self, paused: list[LlmRequest]) -> None:
        """Release the blocks and other resources of these requests, and return the requests to the context phase.

        The requests must be in no step in flight. Published blocks stay reusable.
        """
        for request in paused:
            num_computed = self._kv.kv_length(request) if request.is_generating else request.context_position
            self._release_all(request, computed_tokens=0)
            request.pause(self._max_seq_len, num_computed)

    def claim(self, plan: SchedulerOutput, iteration: int, micro_batch_id: int) -> ScheduledBatch:
        """Claim everything that the plan needs, or nothing, and return the batch for the device.

        Mutates the context requests of the plan: their chunks count as computed from now on, and a first chunk skips
        the cached tokens of its prompt.

        Raises OutOfResourceError, with nothing changed, if the plan needs more than is free.
        """
        for fit in self._fits:
            fit(plan)
        contexts = plan.context_requests
        first_chunks = [request for request in contexts if request.is_first_context_chunk] if contexts else contexts
        drafting = self._takes_drafts and any(map(DRAFT_LEN, plan.generation_requests))
        num_drafts = [request.draft_len for request in plan.generation_requests] if drafting else None
        after_contexts = context_drafts(plan, self._kv) if contexts else []
        claimed = self._claim_all(first_chunks, plan.generation_requests, num_drafts, after_contexts)
        context: tuple[ContextWork, ...] = ()
        if contexts:
            drafts_of = dict(after_contexts)
            context = tuple([self._context_work(request, size, drafts_of.get(request, 0))
                             for request, size in zip(contexts, plan.sizes, strict=True)])
        generation = NO_GENERATION
        if plan.generation_requests:
            generation = GenerationWork(claimed.slots, claimed.kv_lengths, plan.generation_requests[0].beam_width)
            if drafting:
                generation = replace(
                    generation, num_drafts=np.array(num_drafts, np.int32),
                    draft_tokens=np.concatenate([np.array(request.draft_tokens, np.int32)
                                                 for request in plan.generation_requests]))
        return ScheduledBatch(iteration, micro_batch_id, context, generation,
                              max_beam_width=self._kv.sequences.max_beam_width)

    def figures(self) -> dict[str, int | str]:
        """Return the statistics of all resources besides blocks."""
        figures: dict[str, int | str] = {}
        for resource in self.others:
            figures |= resource.figures()
        return figures

    def blocks_since_start(self, request: LlmRequest) -> tuple[int, int]:
        """Return how many blocks the request has taken from the pool since it started, and how many it found in the
        cache. A paused request that starts again counts from zero."""
        return self._kv.blocks_since_start(request)

    def reject_drafts(self, requests: Sequence[LlmRequest], num_rejected: Sequence[int]) -> None:
        """Release the blocks of rejected drafts.

        num_rejected   number of rejected drafts of each request
        """
        self._kv.rewind(requests, num_rejected)

    def unclaim(self, batch: ScheduledBatch, requests: Sequence[LlmRequest], void: Sequence[LlmRequest]) -> None:
        """Undo the claims of a step for the requests with void rows. These requests return to their state before
        the step. The KV cache entries that the step writes for these requests are cleared.

        requests   requests of the batch, in its order
        void       the requests with void rows; none of them starts in this step
        """
        if not void:
            return
        contexts = {request: work for work, request in zip(batch.context, requests)}
        generation = [request for request in void if request not in contexts]
        for request in void:
            if request in contexts:
                start = contexts[request].start
                self._clear_span(request, start, request.context_position)
                request.unlaunch_context(start)
        for request in generation:
            end = self._kv.kv_length(request)    # one token: a request with drafts never runs ahead
            self._clear_span(request, end - 1, end)
        self._kv.rewind(generation, 1)

    def awaited(self, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        """Return the requests in flight whose next step has to wait for this one, because a resource says so."""
        if not self._awaits:
            return []
        return [request for request in requests if any(awaits(request) for awaits in self._awaits)]

    def leaving_window(self, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        """Return the started requests whose next claim frees blocks, because these blocks leave the window."""
        return self._kv.leaving_window(requests)

    def follow(self, request: LlmRequest, parents: Sequence[int]) -> None:
        """Let beam b of the request continue from the blocks of beam parents[b].

        Right after the context, all beams continue from the first beam: its last block is copied to the other beams.
        """
        if request.num_generated_tokens:
            self.device_work.add(self._kv.reorder(request, parents))
        else:
            self.device_work.add(self._kv.fork(request))

    def _claim_all(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest],
                   num_drafts: Sequence[int] | None, after_contexts: ContextDrafts) -> Claim:
        claimed: list[Resource] = []
        operations: list[DeviceOperation] = []
        try:
            for resource in self.others:
                operations += resource.claim(first_chunks) or ()
                claimed.append(resource)
            blocks = self._kv.claim(first_chunks, generation, num_drafts, after_contexts)
        except BaseException:
            for resource in reversed(claimed):
                for request in first_chunks:
                    resource.release(request)
            self.device_work.add(operations)    # a released adapter counts as loaded
            raise
        if blocks.table_updates is not NO_UPDATES:    # first chunks always have some
            width = self._kv.sequences.max_beam_width
            self.device_work.update_tables(blocks.table_updates, [
                request.seq_slot * width + beam for request in first_chunks for beam in range(width)])
        if operations or blocks.copies:
            self.device_work.add([*operations, *blocks.copies])
        return blocks

    def _context_work(self, request: LlmRequest, size: int, num_drafts: int) -> ContextWork:
        setup = tokens = None
        if request.is_first_context_chunk:
            tokens = np.array(request.tokens[0], np.int32)
            setup = self._setups[request.request_id].continuing(tokens)
            for resource in self.others:
                setup = resource.set_up(request, setup)
            reused = self._kv.reused_tokens(request)
            size = chunk_after_reuse(size, reused, request.prompt_len, self._kv.tokens_per_block)
            request.skip_context(reused)
        start = request.context_position
        if tokens is None:
            token_ids = np.array(request.tokens[0][start:start + size], np.int32)
        else:
            token_ids = tokens[start:start + size]
        table = self._prompt_tables.get(request.request_id)
        request.advance_context(size)
        with_drafts, draft_logits = token_ids, None
        if num_drafts:
            with_drafts = np.append(token_ids, np.array(request.draft_tokens[:num_drafts], np.int32))
            draft_logits = self._draft_logits.get(request.request_id)
        return ContextWork(
            slot=request.seq_slot,
            token_ids=with_drafts,
            start=start,
            is_last_chunk=start + size == request.prompt_len,
            setup=setup,
            embeddings=None if table is None else table.embeddings(token_ids),
            num_drafts=num_drafts,
            draft_logits=None if draft_logits is None else draft_logits[:num_drafts],
        )

    def publish(self, contexts: Sequence[LlmRequest]) -> None:
        """Publish full prompt blocks of these contexts.

        Publishes only blocks that were computed by steps whose results the host has read.

        Does nothing without block reuse.
        """
        if self._kv.enable_block_reuse:
            for request in contexts:
                self._kv.publish_context(request, request.context_read)

    def release(self, request: LlmRequest, *, keep_computed: bool = False, clear_blocks: bool = False,
                is_in_flight: bool = False) -> None:
        """Release everything that the request holds. Does nothing if the request holds nothing.

        keep_computed   keep the computed blocks for reuse by prompts that begin with the same tokens
        clear_blocks    clear the request's unshared, unpublished blocks before the next step, because a step may have
                        left any values in them; overrides `keep_computed` and `is_in_flight`
        is_in_flight    whether steps in flight still write KV cache entries of the request. If so, these entries, and
                        no others, are cleared between these steps and the next one, which may use the blocks again
        """
        if clear_blocks:
            # Shared and published blocks were written by earlier steps.
            self.device_work.add([BlockClear(block_id) for block_id in self._kv.own_blocks(request)])
        elif is_in_flight:
            self._clear_unread(request)
        computed_tokens = self._computed_tokens(request) if keep_computed and not clear_blocks else 0
        self._release_all(request, computed_tokens, is_garbage=clear_blocks)
        self._setups.pop(request.request_id, None)
        self._prompt_tables.pop(request.request_id, None)
        self._draft_logits.pop(request.request_id, None)

    def _clear_unread(self, request: LlmRequest) -> None:
        """Clear the KV cache entries that steps in flight write for an ended request.

        These entries can be NaN or infinite.
        """
        in_context = request.context_read < request.prompt_len
        start = request.context_read if in_context else request.num_tokens - 1
        end = request.context_position
        if end == request.prompt_len:
            end = self._kv.kv_length(request)
        self._clear_span(request, start, end)

    def _clear_span(self, request: LlmRequest, start: int, end: int) -> None:
        """Before the next step, clear the KV cache entries of a request at the positions start <= position < end."""
        self.device_work.add([BlockClear(block_id, first_token)
                              for block_id, first_token in self._kv.blocks_of_span(request, start, end)])

    def _release_all(self, request: LlmRequest, computed_tokens: int, is_garbage: bool = False) -> None:
        if self._kv.owns(request):    # a request holds either blocks and all other resources, or none
            for resource in reversed(self.others):
                resource.release(request)
        self._kv.release(request, computed_tokens, is_garbage)

    def _computed_tokens(self, request: LlmRequest) -> int:
        """Return the number of leading tokens that were reused, computed in a context, or sampled.

        Results of steps that were not read yet do not count. Returns 0 if every one of the tokens was reused.
        """
        if request.context_read == request.prompt_len:
            return request.num_tokens
        return request.context_read if request.context_read > self._kv.reused_tokens(request) else 0
