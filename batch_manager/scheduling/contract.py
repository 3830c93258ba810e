"""The rules a plan keeps, checked before anything of it is carried out."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain, islice
from numbers import Integral
from typing import TypeVar

from ..config import Limits
from ..errors import SchedulerContractError, type_name
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.llm_request import LlmRequest
from .interfaces import GENERATING, RequestList, SchedulerOutput

Thing = TypeVar("Thing")


def plain_plan(plan: SchedulerOutput, num_active: int) -> SchedulerOutput:
    """The plan with lists in place of all containers. Each container is iterated over once.

    So the plan that is checked is the plan that is carried out, even if a user's container returns other items the next
    time. Of an endless one, no more is read than it takes to see that it breaks a rule. An object that is no plan is
    returned unchanged; `check_plan` reports it. Raises what reading raises.

    num_active   requests a plan can name
    """
    if not isinstance(plan, SchedulerOutput):
        return plan
    contexts, generation, paused = plan.context_requests, plan.generation_requests, plan.paused_requests
    chunk_sizes = plan.chunk_sizes
    if (type(plan) is SchedulerOutput and chunk_sizes is None
            and type(contexts) is type(generation) is type(paused) is list):
        return plan                                             # the usual case
    contexts, generation, paused = (plain_list(named, num_active) for named in (contexts, generation, paused))
    if chunk_sizes is not None:
        # Narrow integers of numpy would overflow in sums.
        chunk_sizes = [int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size
                       for size in plain_list(chunk_sizes, len(contexts))]
    return SchedulerOutput(contexts, generation, paused, chunk_sizes, plan.draft_lengths)


def plain_list(things: Iterable[Thing], most: int) -> list[Thing]:
    """The things in a list, or `most` + 1 of them where there are more. A list is returned as it is."""
    return things if type(things) is list else list(islice(things, most + 1))


def check_plan(scheduler: object, plan: SchedulerOutput, active_requests: RequestList,
               inflight_request_ids: Collection[int], kv_cache_manager: KvCacheManager, limits: Limits) -> None:
    """Raises SchedulerContractError when the plan breaks a rule.

    Whether anything runs at all is checked by the loop, which knows whether a step is in flight.
    """
    rule = broken_rule(plan, active_requests, inflight_request_ids, kv_cache_manager, limits)
    if rule is not None:
        raise SchedulerContractError(scheduler, rule)


def broken_rule(plan: SchedulerOutput, active_requests: RequestList, inflight_request_ids: Collection[int],
                kv_cache_manager: KvCacheManager, limits: Limits) -> str | None:
    """The first rule the plan breaks, in words; None when it keeps them all."""
    if not isinstance(plan, SchedulerOutput):
        return f"schedule_request returned a {type_name(plan)}, not a SchedulerOutput"
    contexts, generation, paused = plan.context_requests, plan.generation_requests, plan.paused_requests
    try:
        named = [*contexts, *generation, *paused]
        if named != active_requests:                            # by identity; equal in most plans: all go on
            distinct = set(named)
            if len(distinct) != len(named):
                return _repetition(plan)
            if not distinct <= set(active_requests):
                stranger = next(request for request in named if request not in active_requests)
                return f"{_of_a_plan(stranger)} is not active"
    except TypeError:
        return "the plan names something that is no request"
    if inflight_request_ids:
        for request in chain(contexts, generation):
            if request.request_id in inflight_request_ids:
                return f"{request} is in flight and cannot run now"

    for request in contexts:
        if not request.is_context:
            return f"{request} is a context request of the plan and not in its context phase"
    generation_tokens = [request.beam_width + request.draft_len for request in generation
                         if request.state in GENERATING]
    if len(generation_tokens) != len(generation):
        request = next(request for request in generation if request.state not in GENERATING)
        return f"{request} is a generation request of the plan and is not generating"
    if limits.max_beam_width > 1:
        widths = sorted({request.beam_width for request in generation})
        if len(widths) > 1:
            return f"generation requests of beam widths {', '.join(map(str, widths))} are to run in one step"
    for request in paused:
        if request.is_finished:
            return f"{request} is to be paused and has finished"

    if len(contexts) + len(generation) > limits.max_batch_size:
        return f"{len(contexts) + len(generation)} requests are to run and max_batch_size is {limits.max_batch_size}"
    tokens = sum(generation_tokens)
    if contexts or plan.chunk_sizes is not None:
        broken = _broken_chunk_rule(plan, limits)
        if broken is not None:
            return broken
        tokens += sum(_computed_tokens(plan, kv_cache_manager))
    if tokens > limits.max_num_tokens:
        return f"{tokens} tokens are to run and max_num_tokens is {limits.max_num_tokens}"

    kv = kv_cache_manager
    if not contexts and tokens <= kv.free_blocks:
        return None                                             # a step needs no more than a block for each token
    first_chunks = [request for request in contexts if not kv.owns(request)]
    free = kv.free_blocks + kv.blocks_freed_by(paused)
    num_drafts = [request.draft_len for request in generation]
    needed = kv.blocks_to_claim(first_chunks, generation, paused, num_drafts if any(num_drafts) else None)
    if needed > free:
        return f"the plan needs {needed} KV cache blocks and {free} are free after its pauses"
    return None


def _repetition(plan: SchedulerOutput) -> str:
    running = [*plan.context_requests, *plan.generation_requests]
    both = next((request for request in plan.paused_requests if request in running), None)
    if both is not None:
        return f"{_of_a_plan(both)} is to be paused and to run"
    counts = Counter(chain(running, plan.paused_requests))
    twice = next(request for request, count in counts.items() if count > 1)
    return f"{_of_a_plan(twice)} is named twice"


def _of_a_plan(thing: object) -> str:
    """An item of a plan, in words. Only a request is shown: anything else might hold tokens."""
    return repr(thing) if isinstance(thing, LlmRequest) else f"something of type {type_name(thing)}"


def _chunk_sizes(plan: SchedulerOutput) -> list[int]:
    if plan.chunk_sizes is None:
        return [request.remaining_context for request in plan.context_requests]
    return list(plan.chunk_sizes)


def _computed_tokens(plan: SchedulerOutput, kv: KvCacheManager) -> list[int]:
    """Tokens of each chunk that are not cached."""
    sizes = _chunk_sizes(plan)
    if not kv.enable_block_reuse:
        return sizes
    return [min(size, request.remaining_context - kv.reusable_tokens(request))
            for request, size in zip(plan.context_requests, sizes, strict=True)]


def _broken_chunk_rule(plan: SchedulerOutput, limits: Limits) -> str | None:
    if plan.chunk_sizes is not None and len(plan.chunk_sizes) != len(plan.context_requests):
        return f"{len(plan.chunk_sizes)} chunk sizes for {len(plan.context_requests)} context requests"
    for request, chunk in zip(plan.context_requests, _chunk_sizes(plan), strict=True):
        if isinstance(chunk, bool) or not isinstance(chunk, Integral) or not 0 < chunk <= request.remaining_context:
            size = int(chunk) if isinstance(chunk, Integral) else f"({type_name(chunk)})"
            return f"a chunk of {size} tokens for {request}, which has {request.remaining_context} left"
        if chunk < request.remaining_context and chunk % limits.tokens_per_block:
            return (f"a chunk of {chunk} tokens for {request}: it is not the last, so it must be a multiple of "
                    f"tokens_per_block ({limits.tokens_per_block})")
    return None
