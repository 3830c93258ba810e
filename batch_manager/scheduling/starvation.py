"""Detects starved requests: started ones that no plan schedules any more, so that their blocks would never be free."""

from collections.abc import Collection

from ..config import Limits
from ..errors import SchedulerContractError
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.llm_request import LlmRequest
from .interfaces import RequestList, SchedulerOutput

LOOK_EVERY = 50
LOOKS = 200


class StarvationCheck:
    """Notices a scheduler that starves a started request.

    A plan passes a request over when the request holds blocks, is not blocked by a step in flight, and is neither
    scheduled nor paused, although a request after it in the line is scheduled and the step had room for it too: a
    sequence, tokens, blocks, and beams as wide as the others'. A single such plan is legal: micro-batches and
    preferences work that way. LOOK_EVERY * LOOKS of them without progress of the request are not. One plan in
    LOOK_EVERY is examined and counts for all.
    """

    def __init__(self, kv_cache_manager: KvCacheManager, limits: Limits) -> None:
        self._kv = kv_cache_manager
        self._limits = limits
        self._plans = 0
        self._passed_over: dict[LlmRequest, tuple[int, int]] = {}    # (progress, times passed over at that progress)

    def look(self, scheduler: object, plan: SchedulerOutput, active_requests: RequestList,
             inflight_request_ids: Collection[int]) -> None:
        """Count a plan that keeps all other rules.

        active_requests   in the order in which they are to be served
        Raises SchedulerContractError.
        """
        self._plans += 1
        if self._plans % LOOK_EVERY:
            return
        passed_over = self._passed_over_by(plan, active_requests, inflight_request_ids)
        counts = {}
        for request in {*self._passed_over, *passed_over}:
            progress = request.context_position + request.num_tokens
            before, count = self._passed_over.get(request, (progress, 0))
            count = (count if progress == before else 0) + (request in passed_over)
            if count == LOOKS:
                raise SchedulerContractError(scheduler, f"{request} holds {self._kv.held_blocks(request)} KV cache "
                                             f"blocks, and {LOOK_EVERY * LOOKS} plans passed it over that had room for "
                                             "it; schedule it or pause it")
            if count and self._kv.owns(request):
                counts[request] = progress, count
        self._passed_over = counts

    def _passed_over_by(self, plan: SchedulerOutput, active_requests: RequestList,
                        inflight_request_ids: Collection[int]) -> RequestList:
        running = {*plan.context_requests, *plan.generation_requests}
        if not running or len(running) == self._limits.max_batch_size:
            return []
        last = max(index for index, request in enumerate(active_requests) if request in running)
        line = active_requests[:last]
        passed_over = [request for request in line if request not in running and self._kv.owns(request)
                       and not request.is_finished and request.request_id not in inflight_request_ids
                       and request not in plan.paused_requests]
        return [request for request in passed_over if self._had_room(plan, request)] if passed_over else []

    def _had_room(self, plan: SchedulerOutput, request: LlmRequest) -> bool:
        sizes = plan.chunk_sizes
        if sizes is None:
            sizes = [context.remaining_context for context in plan.context_requests]
        tokens = sum(sizes) + sum(other.beam_width + other.draft_len for other in plan.generation_requests)
        if request.is_context:
            tokens += min(request.remaining_context, self._limits.tokens_per_block)
        else:
            tokens += request.beam_width + request.draft_len
            if any(other.beam_width != request.beam_width for other in plan.generation_requests):
                return False
        first_chunks = [context for context in plan.context_requests if not self._kv.owns(context)]
        blocks = self._kv.blocks_to_claim(first_chunks, plan.generation_requests)
        blocks += self._kv.start_scheduling().blocks_for_next_step(request)
        return tokens <= self._limits.max_num_tokens and blocks <= self._kv.free_blocks
