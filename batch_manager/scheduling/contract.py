"""Checks a plan against the rules of the scheduler contract before it runs."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain, islice
from numbers import Integral
from typing import TypeVar

from ..config import Limits
from ..errors import SchedulerContractError, counted, type_name
from ..kv.kv_cache_manager import KvCacheManager
from ..kv.peft_cache_manager import PeftCacheManager
from ..requests.llm_request import GENERATING, LlmRequest
from .interfaces import RequestList, SchedulerOutput

Thing = TypeVar("Thing")


def with_lists(plan: SchedulerOutput, num_active: int) -> SchedulerOutput:
    """Return the plan with its requests and chunk sizes converted to lists.

    Each container is iterated over once. The checked plan is therefore the executed plan, even if a user's container
    would return other items the next time. From an endless container, the function reads only enough items to break a
    rule. An object of another type is returned unchanged; `check_plan` reports it. An exception of a container
    propagates.

    num_active   number of active requests
    """
    if not isinstance(plan, SchedulerOutput):
        return plan
    contexts, generation, paused = plan.context_requests, plan.generation_requests, plan.paused_requests
    if (type(plan) is SchedulerOutput and plan.chunk_sizes is None is plan.draft_lengths
            and type(contexts) is type(generation) is type(paused) is list):
        return plan                                             # the usual case
    contexts, generation, paused = (as_list(named, num_active) for named in (contexts, generation, paused))
    # Sums of narrow numpy integers would overflow.
    chunk_sizes, draft_lengths = (
        None if numbers is None else [int(number) if isinstance(number, Integral) and not isinstance(number, bool)
                                      else number for number in as_list(numbers, len(contexts))]
        for numbers in (plan.chunk_sizes, plan.draft_lengths))
    return SchedulerOutput(contexts, generation, paused, chunk_sizes, draft_lengths)


def as_list(things: Iterable[Thing], most: int) -> list[Thing]:
    """Return `things` itself if it is a list, and otherwise a list of its first `most` + 1 items."""
    return things if type(things) is list else list(islice(things, most + 1))


def context_drafts(plan: SchedulerOutput, kv: KvCacheManager) -> list[tuple[LlmRequest, int]]:
    """Return (request, number of its draft tokens in the step) of each request that completes its context with drafts.

    A step with beams verifies none: several rows of a sequence are beams there.
    """
    if not (plan.context_requests and kv.window.max_draft_len):
        return []
    kept = plan.draft_lengths or [request.draft_len for request in plan.context_requests]
    drafts = [(request, min(count, kv.most_context_drafts(request)))
              for request, size, count in zip(plan.context_requests, plan.sizes, kept, strict=True)
              if size == request.remaining_context]
    drafts = [(request, count) for request, count in drafts if count]
    if drafts and any(request.beam_width > 1 for request in (*plan.context_requests, *plan.generation_requests)):
        return []
    return drafts


def check_plan(scheduler: object, plan: SchedulerOutput, active_requests: RequestList,
               inflight_request_ids: Collection[int], kv_cache_manager: KvCacheManager, limits: Limits,
               peft_cache_manager: PeftCacheManager | None = None) -> None:
    """Raise SchedulerContractError if the plan breaks a rule.

    One rule is not checked here, but by the loop: if no step is in flight, the plan must schedule a request.
    """
    rule = broken_rule(plan, active_requests, inflight_request_ids, kv_cache_manager, limits)
    if rule is None and peft_cache_manager is not None:
        needed, free = peft_cache_manager.pages_to_claim(plan.context_requests, plan.paused_requests)
        if needed > free:
            rule = f"the plan needs {counted(needed, 'adapter page')} and its pauses leave {free} free"
    if rule is not None:
        raise SchedulerContractError(scheduler, rule)


def broken_rule(plan: SchedulerOutput, active_requests: RequestList, inflight_request_ids: Collection[int],
                kv_cache_manager: KvCacheManager, limits: Limits) -> str | None:
    """Describe the first rule that the plan breaks. Returns None if the plan keeps all rules."""
    if not isinstance(plan, SchedulerOutput):
        return f"schedule_request returned a value of type {type_name(plan)}, not a SchedulerOutput"
    contexts, generation, paused = plan.context_requests, plan.generation_requests, plan.paused_requests
    try:
        named = [*contexts, *generation, *paused]
        if named != active_requests:                            # by identity; equal in most plans: all requests go on
            distinct = set(named)
            if len(distinct) != len(named):
                return _repetition(plan)
            if not distinct <= set(active_requests):
                stranger = next(request for request in named if request not in active_requests)
                return f"{_of_a_plan(stranger)} is not active"
    except TypeError:
        return "the plan contains an object that is not a request"
    if inflight_request_ids:
        for request in chain(contexts, generation):
            if request.request_id in inflight_request_ids:
                return f"{request} is in flight and cannot run now"

    for request in contexts:
        if not request.is_context:
            return f"{request} is in context_requests, but not in its context phase"
    generation_tokens = [request.step_tokens for request in generation if request.state in GENERATING]
    if len(generation_tokens) != len(generation):
        request = next(request for request in generation if request.state not in GENERATING)
        return f"{request} is in generation_requests, but is not generating"
    if limits.max_beam_width > 1:
        widths = sorted({request.beam_width for request in generation})
        if len(widths) > 1:
            return f"one step has generation requests of beam widths {', '.join(map(str, widths))}"
    for request in paused:
        if request.is_finished:
            return f"{request} is in paused_requests, but has finished"

    if len(contexts) + len(generation) > limits.max_batch_size:
        return f"the step has {counted(len(contexts) + len(generation), 'request')} and max_batch_size is " \
               f"{limits.max_batch_size}"
    tokens, drafts = sum(generation_tokens), []
    if contexts or plan.chunk_sizes is not None or plan.draft_lengths is not None:
        broken = _broken_chunk_rule(plan, limits)
        if broken is not None:
            return broken
        drafts = context_drafts(plan, kv_cache_manager)
        tokens += sum(_computed_tokens(plan, kv_cache_manager)) + sum(count for _, count in drafts)
    if tokens > limits.max_num_tokens:
        return f"the step has {counted(tokens, 'token')} and max_num_tokens is {limits.max_num_tokens}"

    kv = kv_cache_manager
    if not contexts and tokens <= kv.free_blocks:
        return None                                             # a step needs at most one block per token
    first_chunks = [request for request in contexts if not kv.owns(request)]
    free = kv.free_blocks + kv.blocks_freed_by(paused)
    num_drafts = [request.draft_len for request in generation]
    needed = kv.blocks_to_claim(first_chunks, generation, paused, num_drafts if any(num_drafts) else None, drafts)
    if needed > free:
        return f"the plan needs {counted(needed, 'KV cache block')} and its pauses leave {free} free"
    return None


def _repetition(plan: SchedulerOutput) -> str:
    running = [*plan.context_requests, *plan.generation_requests]
    both = next((request for request in plan.paused_requests if request in running), None)
    if both is not None:
        return f"{_of_a_plan(both)} is both paused and scheduled"
    counts = Counter(chain(running, plan.paused_requests))
    twice = next(request for request, count in counts.items() if count > 1)
    return f"{_of_a_plan(twice)} is in the plan twice"


def _of_a_plan(thing: object) -> str:
    """Describe an item of a plan. For an item that is not a request, shows only the type: the item may contain tokens.
    """
    return repr(thing) if isinstance(thing, LlmRequest) else f"an object of type {type_name(thing)}"


def _computed_tokens(plan: SchedulerOutput, kv: KvCacheManager) -> list[int]:
    """For each chunk, the number of its tokens that are not cached."""
    sizes = list(plan.sizes)
    if not kv.enable_block_reuse:
        return sizes
    return [min(size, request.remaining_context - kv.reusable_tokens(request))
            for request, size in zip(plan.context_requests, sizes, strict=True)]


def _broken_chunk_rule(plan: SchedulerOutput, limits: Limits) -> str | None:
    if plan.chunk_sizes is not None and len(plan.chunk_sizes) != len(plan.context_requests):
        return (f"the plan has {counted(len(plan.chunk_sizes), 'chunk size')} for "
                f"{counted(len(plan.context_requests), 'context request')}")
    if plan.draft_lengths is not None and len(plan.draft_lengths) != len(plan.context_requests):
        return (f"the plan has {counted(len(plan.draft_lengths), 'draft length')} for "
                f"{counted(len(plan.context_requests), 'context request')}")
    for request, count in zip(plan.context_requests, plan.draft_lengths or ()):
        if isinstance(count, bool) or not isinstance(count, Integral):
            return f"{request} gets a draft length of type {type_name(count)}, not an integer"
        if not 0 <= count <= request.draft_len:
            return f"{request} keeps {counted(int(count), 'draft token')} and has {request.draft_len}"
    for request, chunk in zip(plan.context_requests, plan.sizes, strict=True):
        if isinstance(chunk, bool) or not isinstance(chunk, Integral):
            return f"{request} gets a chunk size of type {type_name(chunk)}, not an integer"
        if not 0 < chunk <= request.remaining_context:
            return (f"{request} gets a chunk of {counted(int(chunk), 'token')} and has "
                    f"{counted(request.remaining_context, 'context token')} left")
        if chunk < request.remaining_context and chunk % limits.tokens_per_block:
            return (f"{request} gets a chunk of {counted(int(chunk), 'token')}, which is not its last and so must be a "
                    f"multiple of tokens_per_block ({limits.tokens_per_block})")
    return None
