"""Determines why an active request is not in a step, for traces.

A scheduler returns no reasons and may be custom. The reason is therefore inferred: it is the first obstacle to adding
the request to the plan.
"""

from collections.abc import Collection

from ..config import Limits
from ..kv.kv_cache_manager import KvCacheManager
from ..kv.peft_cache_manager import PeftCacheManager
from ..names import SchedulerPolicy
from ..requests.llm_request import GENERATING, LlmRequest
from .duplicates import DuplicateDelay
from .interfaces import RequestList, SchedulerOutput

COMPLETE = "complete; its batch was not done"     # all its tokens are there (TrtGptModelType.V1)
IN_FLIGHT = "step in flight"             # an earlier step of the request is not read yet
BATCH_SIZE = "max_batch_size"            # the step has max_batch_size requests
BATCH_RUNS = "static batch"              # the running static batch has not ended (TrtGptModelType.V1)
PREFIX = "prefix being computed"         # another request computes a block that this request will share
BLOCKS = "KV cache blocks"               # too few blocks are free and not reserved for started requests
ADAPTER_PAGES = "adapter pages"          # too few pages for its adapter are free, or the step loads others first
TOKENS = "max_num_tokens"                # too few tokens of the step are left
BEAM_WIDTH = "beam width"                # the generating requests of the step have another beam width
ORDER = "order"                          # no other reason: after a waiting request, or the scheduler's choice
REASONS = (IN_FLIGHT, COMPLETE, BATCH_SIZE, BATCH_RUNS, PREFIX, BLOCKS, ADAPTER_PAGES, TOKENS, BEAM_WIDTH,
           ORDER)

MOST_EXAMINED = 16    # requests examined per iteration; further requests get the reason ORDER


def waiting_reasons(plan: SchedulerOutput, active_requests: RequestList, in_flight_ids: Collection[int],
                    kv_cache_manager: KvCacheManager, limits: Limits,
                    peft_cache_manager: PeftCacheManager | None = None, *,
                    is_static: bool = False) -> dict[str, tuple[int, ...]]:
    """Return reason -> ids of the active requests that the plan leaves out for this reason.

    The ids are in the order of `active_requests`. Requests that the plan pauses are not listed.

    plan        the plan, whose blocks are not claimed yet
    is_static   whether requests run in static batches
    """
    running = {*plan.context_requests, *plan.generation_requests}
    named = running.union(plan.paused_requests)
    waiting = [request for request in active_requests if request not in named]
    reasons: dict[str, list[int]] = {}
    ready = []
    for request in waiting:
        if request.is_finished:
            reasons.setdefault(COMPLETE, []).append(request.request_id)
        elif request.request_id in in_flight_ids:
            reasons.setdefault(IN_FLIGHT, []).append(request.request_id)
        else:
            ready.append(request)
    if ready:
        reason_of = _Obstacles(plan, active_requests, kv_cache_manager, limits, peft_cache_manager,
                               is_static=is_static).first
        for index, request in enumerate(ready):
            reason = reason_of(request) if index < MOST_EXAMINED else ORDER
            reasons.setdefault(reason, []).append(request.request_id)
    return {reason: tuple(ids) for reason, ids in reasons.items()}


class _Obstacles:
    """Finds the first obstacle that keeps a request out of a plan."""

    def __init__(self, plan: SchedulerOutput, active_requests: RequestList, kv_cache_manager: KvCacheManager,
                 limits: Limits, peft_cache_manager: PeftCacheManager | None, *, is_static: bool) -> None:
        contexts, generation = plan.context_requests, plan.generation_requests
        self._limits, self._kv, self._is_static = limits, kv_cache_manager, is_static
        self._delay = DuplicateDelay(kv_cache_manager, active_requests)
        for request in contexts:
            self._delay.holds_back(request)             # records the block that the step computes
        self._pages, self._held = None, {request for request in active_requests if kv_cache_manager.owns(request)}
        if peft_cache_manager is not None:
            self._pages = peft_cache_manager.start_scheduling()
            self._pages.spend(*self._held.difference(plan.paused_requests), *contexts)
        self._is_full = len(contexts) + len(generation) >= limits.max_batch_size
        self._generates = bool(generation)
        self._beam_width = generation[0].beam_width if generation else None
        self._tokens_left = limits.max_num_tokens - sum(plan.sizes) - sum(
            request.step_tokens for request in generation)

        self._to_completion = limits.scheduler_policy is SchedulerPolicy.GUARANTEED_NO_EVICT
        ledger = self._ledger = kv_cache_manager.start_scheduling()
        for request in plan.paused_requests:
            ledger.refund(request)
        if self._to_completion:
            ledger.spend(ledger.blocks_to_completion_of_started())
            for request in contexts:
                if not kv_cache_manager.owns(request):
                    ledger.spend(ledger.blocks_to_completion(request), request)
        else:
            ledger.spend(ledger.blocks_for_next_step_of_generating(generation))
            for request in contexts:
                ledger.spend(ledger.blocks_for_next_step(request), request)

    def first(self, request: LlmRequest) -> str:
        """Return the first obstacle that keeps the request out of the plan, as one of REASONS."""
        if self._is_static and self._generates and request.is_context:
            return BATCH_RUNS
        if self._is_full:
            return BATCH_SIZE
        if self._delay.holds_back(request):
            return PREFIX
        if not self._ledger.fits(self._blocks(request)):
            return BLOCKS
        if self._pages is not None and request not in self._held and not (
                self._pages.fits(request) and self._pages.may_load(request)):
            return ADAPTER_PAGES
        if self._least_tokens(request) > self._tokens_left:
            return TOKENS
        if request.state in GENERATING and self._beam_width not in (None, request.beam_width):
            return BEAM_WIDTH
        return ORDER

    def _blocks(self, request: LlmRequest) -> int:
        if not self._to_completion:
            return self._ledger.blocks_for_next_step(request)
        return 0 if self._kv.owns(request) else self._ledger.blocks_to_completion(request)

    def _least_tokens(self, request: LlmRequest) -> int:
        """The least number of tokens that the request needs in a step."""
        if request.state in GENERATING:
            return request.step_tokens
        remaining = max(request.remaining_context - self._kv.reusable_tokens(request), 1)
        return min(remaining, self._limits.tokens_per_block) if self._limits.enable_chunked_context else remaining
