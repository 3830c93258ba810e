"""What a request must hold to run: KV cache blocks, and what the device knows of its slot."""

import numpy as np

from ..handover import NO_GENERATION, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..requests.prompt_table import PromptTable
from ..scheduling.interfaces import SchedulerOutput
from .static_batch import StaticBatch


class Resources:
    """Claims for a plan, gives back on pause and at the end. One owner per block; release is idempotent."""

    def __init__(self, kv_cache_manager: KvCacheManager, max_seq_len: int,
                 static_batch: StaticBatch | None = None) -> None:
        self._kv = kv_cache_manager
        self._max_seq_len = max_seq_len
        self._static_batch = static_batch
        self._setups: dict[int, SlotSetup] = {}
        self._prompt_tables: dict[int, PromptTable] = {}

    def admit(self, admitted: Admitted) -> None:
        """Remember what the device must be told when the request starts."""
        request_id = admitted.request.request_id
        self._setups[request_id] = admitted.setup
        if admitted.prompt_table is not None:
            self._prompt_tables[request_id] = admitted.prompt_table

    def pause(self, paused: list[LlmRequest]) -> int:
        """Take the blocks back from these requests. Returns the tokens that will have to be computed again."""
        recomputed = 0
        for request in paused:
            recomputed += self._kv.kv_length(request) if request.is_generating else request.context_position
            self._kv.release(request)
            request.pause(self._max_seq_len)
        return recomputed

    def claim(self, plan: SchedulerOutput, iteration: int, micro_batch_id: int) -> ScheduledBatch:
        """Take the blocks the plan needs, all or nothing, and describe the step to the device.

        Raises OutOfBlocksError, with nothing changed, when the pool cannot serve the plan.
        """
        first_chunks = [request for request in plan.context_requests if request.is_first_context_chunk]
        updates = self._kv.claim(first_chunks, plan.generation_requests)
        chunk_sizes = plan.chunk_sizes or [request.remaining_context for request in plan.context_requests]
        context = tuple(self._context_work(request, size)
                        for request, size in zip(plan.context_requests, chunk_sizes, strict=True))
        generation = NO_GENERATION
        if plan.generation_requests:
            slots = self._kv.slots(plan.generation_requests)
            # The step feeds the newest token, for which the claim has just made room.
            generation = GenerationWork(slots, self._kv.kv_lengths(slots) - 1)
        num_places = 0
        if self._static_batch is not None:
            if plan.context_requests:
                self._static_batch.form(plan.context_requests)
            num_places = self._static_batch.num_places
        return ScheduledBatch(iteration, micro_batch_id, context, generation, updates, num_places)

    def _context_work(self, request: LlmRequest, size: int) -> ContextWork:
        start = request.context_position
        token_ids = np.array(request.tokens[0][start:start + size], np.int32)
        table = self._prompt_tables.get(request.request_id)
        return ContextWork(
            slot=request.seq_slot,
            token_ids=token_ids,
            start=start,
            is_last_chunk=start + size == request.prompt_len,
            setup=self._setups[request.request_id].continuing(request.tokens[0]) if start == 0 else None,
            embeddings=None if table is None else table.embeddings(token_ids),
        )

    def blocks_of(self, request: LlmRequest) -> list[int]:
        return self._kv.block_ids(request)

    def release(self, request: LlmRequest) -> None:
        """Give everything back. A request that holds nothing is fine."""
        self._kv.release(request)
        self._setups.pop(request.request_id, None)
        self._prompt_tables.pop(request.request_id, None)
