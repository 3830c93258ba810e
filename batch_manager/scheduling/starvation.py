"""Detects starved requests: started requests that no plan schedules any more, and whose blocks are never freed."""

from collections.abc import Collection

from ..config import Limits
from ..errors import SchedulerContractError
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.llm_request import LlmRequest
from .interfaces import RequestList, SchedulerOutput

CHECK_EVERY = 50
MAX_CHECKS = 200


class StarvationCheck:
    """Detects a scheduler that starves a started request.

    A request can be passed over if it holds blocks and is not blocked by a step in flight. A plan passes over the
    request if all these conditions are true:

    - The plan neither schedules nor pauses the request.
    - The plan schedules a later request.
    - The step has room for the request: it has fewer than max_batch_size requests, its token limit and the free blocks
      suffice for the request too, and a generating request has the beam width of the generating requests in the step.

    A single such plan is legal, because micro-batches and preferences produce such plans. CHECK_EVERY * MAX_CHECKS such
    plans without progress of the request break the contract. The check examines one plan in CHECK_EVERY, and counts it
    as CHECK_EVERY plans.
    """

    def __init__(self, kv_cache_manager: KvCacheManager, limits: Limits) -> None:
        self._kv = kv_cache_manager
        self._limits = limits
        self._plans = 0
        self._passed_over: dict[LlmRequest, tuple[int, int]] = {}    # (progress, times passed over at that progress)

    def check(self, scheduler: object, plan: SchedulerOutput, active_requests: RequestList,
              inflight_request_ids: Collection[int]) -> None:
        """Examine a plan that passed `check_plan`. Raises SchedulerContractError if the scheduler starves a request.

        active_requests   in service order
        """
        self._plans += 1
        if self._plans % CHECK_EVERY:
            return
        passed_over = self._passed_over_by(plan, active_requests, inflight_request_ids)
        counts = {}
        for request in {*self._passed_over, *passed_over}:
            progress = request.context_position + request.num_tokens
            before, count = self._passed_over.get(request, (progress, 0))
            count = (count if progress == before else 0) + (request in passed_over)
            if count == MAX_CHECKS:
                raise SchedulerContractError(scheduler, f"{request} holds {self._kv.held_blocks(request)} KV cache "
                                             f"blocks, and {CHECK_EVERY * MAX_CHECKS} plans neither scheduled nor "
                                             "paused it although there was room")
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
        tokens = sum(plan.sizes) + sum(other.step_tokens for other in plan.generation_requests)
        if request.is_context:
            tokens += min(request.remaining_context, self._limits.tokens_per_block)
        else:
            tokens += request.step_tokens
            if any(other.beam_width != request.beam_width for other in plan.generation_requests):
                return False
        first_chunks = [context for context in plan.context_requests if not self._kv.owns(context)]
        blocks = self._kv.blocks_to_claim(first_chunks, plan.generation_requests)
        blocks += self._kv.start_scheduling().blocks_for_next_step(request)
        return tokens <= self._limits.max_num_tokens and blocks <= self._kv.free_blocks
