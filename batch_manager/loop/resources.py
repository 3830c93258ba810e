"""What a request must hold to run: KV cache blocks, and what the device knows of its slot."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..handover import (
    NO_GENERATION,
    BlockCopy,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from ..kv.claims import Claim
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..requests.prompt_table import PromptTable
from ..scheduling.chunking import chunk_behind_reuse
from ..scheduling.interfaces import SchedulerOutput
from .static_batch import StaticBatch


class Resource(Protocol):
    """Something besides KV cache blocks that a request holds from its first step to its last, or to a pause.

    kv.PeftCacheManager is one. What of it a plan may count on is for the scheduler to know.
    """

    def claim(self, requests: Sequence[LlmRequest]) -> object:
        """Hold what these requests need, none of which holds anything. All or nothing.

        Raises OutOfResourceError, with nothing changed.
        """
        ...

    def release(self, request: LlmRequest) -> None:
        """Give back what the request holds."""
        ...


class Resources:
    """Claims for a plan, gives back on pause and at the end. One owner per block; release is idempotent.

    others   what requests hold besides blocks: claimed in this order, before blocks, and released the other way round
    """

    def __init__(self, kv_cache_manager: KvCacheManager, max_seq_len: int,
                 static_batch: StaticBatch | None = None, others: Sequence[Resource] = ()) -> None:
        self.others = tuple(others)
        self._kv = kv_cache_manager
        self._max_seq_len = max_seq_len
        self._static_batch = static_batch
        self._setups: dict[int, SlotSetup] = {}
        self._prompt_tables: dict[int, PromptTable] = {}
        self._copies: list[BlockCopy] = []

    def admit(self, admitted: Admitted) -> None:
        """Remember what the device must be told when the request starts."""
        request_id = admitted.request.request_id
        self._setups[request_id] = admitted.setup
        if admitted.prompt_table is not None:
            self._prompt_tables[request_id] = admitted.prompt_table

    def pause(self, paused: list[LlmRequest]) -> int:
        """Take the blocks back from these requests. What was published of their prompts can still be found.

        Returns the tokens that will have to be computed again, if nothing is found.
        """
        recomputed = 0
        for request in paused:
            recomputed += self._kv.kv_length(request) if request.is_generating else request.context_position
            self._give_back(request, computed_tokens=0)
            request.pause(self._max_seq_len)
        return recomputed

    def claim(self, plan: SchedulerOutput, iteration: int, micro_batch_id: int) -> ScheduledBatch:
        """Take what the plan needs, all or nothing, and describe the step to the device.

        A first chunk begins behind what the KV cache has of its prompt: the request has skipped that when this returns.

        Raises OutOfResourceError, with nothing changed, when there is not enough for the plan.
        """
        first_chunks = [request for request in plan.context_requests if request.is_first_context_chunk]
        claim = self._claim_all(first_chunks, plan.generation_requests)
        # What the beams of a step became comes first: a claim may have given away what they have left since.
        self._copies += claim.copies
        chunk_sizes = plan.chunk_sizes
        if chunk_sizes is None:
            chunk_sizes = [request.remaining_context for request in plan.context_requests]
        context = tuple(self._context_work(request, size)
                        for request, size in zip(plan.context_requests, chunk_sizes, strict=True))
        generation = NO_GENERATION
        if plan.generation_requests:
            generation = GenerationWork(claim.slots, claim.kv_lengths, plan.generation_requests[0].beam_width)
        num_places = 0
        if self._static_batch is not None:
            if plan.context_requests:
                self._static_batch.form(plan.context_requests)
            num_places = self._static_batch.num_places
        return ScheduledBatch(iteration, micro_batch_id, context, generation, claim.table_updates, num_places,
                              self._kv.sequences.max_beam_width)

    def take_copies(self) -> list[BlockCopy]:
        """What has to be copied before the batch of the last claim is started."""
        copies, self._copies = self._copies, []
        return copies

    def follow(self, request: LlmRequest, parents: Sequence[int]) -> None:
        """Make each beam of the request hold what its parent does; behind the context that is the first one for all."""
        if request.num_generated_tokens:
            self._copies += self._kv.reorder(request, parents)
        else:
            self._copies += self._kv.fork(request)

    def _claim_all(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest]) -> Claim:
        claimed: list[Resource] = []
        try:
            for resource in self.others:
                resource.claim(first_chunks)
                claimed.append(resource)
            return self._kv.claim(first_chunks, generation)
        except BaseException:
            for resource in reversed(claimed):
                for request in first_chunks:
                    resource.release(request)
            raise

    def _context_work(self, request: LlmRequest, size: int) -> ContextWork:
        setup = None
        if request.is_first_context_chunk:
            setup = self._setups[request.request_id].continuing(np.array(request.tokens[0], np.int32))
            reused = self._kv.reused_tokens(request)
            size = chunk_behind_reuse(size, reused, request.prompt_len, self._kv.tokens_per_block)
            request.skip_context(reused)
        start = request.context_position
        if setup is None:
            token_ids = np.array(request.tokens[0][start:start + size], np.int32)
        else:
            token_ids = setup.history[start:start + size]
        table = self._prompt_tables.get(request.request_id)
        return ContextWork(
            slot=request.seq_slot,
            token_ids=token_ids,
            start=start,
            is_last_chunk=start + size == request.prompt_len,
            setup=setup,
            embeddings=None if table is None else table.embeddings(token_ids),
        )

    def publish(self, contexts: Sequence[LlmRequest]) -> None:
        """Let other prompts use what a finished step has computed of these. One whose row failed did not advance, so
        nothing of that step is among it.
        """
        if self._kv.enable_block_reuse:
            for request in contexts:
                self._kv.publish_context(request, request.context_position)

    def blocks_to_clear(self, request: LlmRequest) -> list[int]:
        """Blocks a failed step may have left anything in. Those that others hold or can find were written before."""
        return self._kv.own_blocks(request)

    def release(self, request: LlmRequest, *, keep_computed: bool = False) -> None:
        """Give everything back. A request that holds nothing is fine.

        keep_computed   all that was computed of it is right: prompts that begin with the same tokens may find it
        """
        self._give_back(request, self._computed_tokens(request) if keep_computed else 0)
        self._setups.pop(request.request_id, None)
        self._prompt_tables.pop(request.request_id, None)

    def _give_back(self, request: LlmRequest, computed_tokens: int) -> None:
        if self._kv.owns(request):    # who holds blocks holds all the rest, and who does not, nothing
            for resource in reversed(self.others):
                resource.release(request)
        self._kv.release(request, computed_tokens)

    def _computed_tokens(self, request: LlmRequest) -> int:
        """Leading tokens of which all is in the cache, 0 when steps have added none to what was found there."""
        if request.context_position == request.prompt_len:
            return request.num_tokens
        return request.context_position if request.context_position > self._kv.reused_tokens(request) else 0
