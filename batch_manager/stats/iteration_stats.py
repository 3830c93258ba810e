"""One iteration in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..kv.kv_cache_manager import KvCacheUsage
from ..names import ErrorCode
from ..requests.llm_request import LlmRequest
from ..seams import MemoryUsage


@dataclass(frozen=True, slots=True)
class StaticBatchStats:
    """A static batch as it was formed; the same in every iteration until its last member is done.

    members                   requests that run in lockstep
    context_tokens            sum of their prompts, without padding
    total_generation_tokens   that they may generate, all together; an upper bound, not what came of it
    empty_generation_slots    places of the padded batch that none of those tokens takes: every member has as many as
                              the one that may generate most
    """

    members: int = 0
    context_tokens: int = 0
    total_generation_tokens: int = 0
    empty_generation_slots: int = 0

    @staticmethod
    def of(members: Sequence[LlmRequest], max_seq_len: int) -> "StaticBatchStats":
        longest_prompt = max(request.prompt_len for request in members)
        max_new_tokens = min(max(request.max_new_tokens for request in members), max_seq_len - longest_prompt)
        total = sum(min(request.max_new_tokens, max_new_tokens) for request in members)
        return StaticBatchStats(
            members=len(members),
            context_tokens=sum(request.prompt_len for request in members),
            total_generation_tokens=total,
            empty_generation_slots=len(members) * max_new_tokens - total)


@dataclass(slots=True)    # frozen it would take several microseconds to make
class IterationStats:
    """One iteration that had an active request. Counts describe the step as it was launched.

    iteration               rises by one with every record
    active_requests         when the step was planned, before its results were harvested
    scheduled, context, generation, paused   requests of this iteration's plan
    context_tokens          prompt tokens computed
    generated_tokens        tokens that were appended to a request
    recomputed_tokens       tokens of paused requests that will have to be computed again, since construction
    discarded_tokens        tokens computed for requests that had ended before they were read, since construction
    steps_in_flight         steps that were launched and not read when the iteration ended
    queued_requests, queued_tokens   accepted, waiting for a place among the active ones
    monotonic_seconds       of the engine's clock
    new_requests, refused_requests   accepted and refused since the last record
    prompt_tokens           of accepted requests, since construction
    lookup_tokens, hit_tokens   prompt tokens looked up in the cache and found there, since construction
    oldest_wait_seconds     of the first request that was accepted and never was in a step
    started_requests, queue_seconds, longest_queue_seconds   since the last record: requests that were in a step for the
                            first time, the sum of their times from arrival to that step, and the longest
    reasons                 finals without an error by reason, since construction
    callback_seconds        inside the user's callbacks since the last record
    iteration_seconds       from the start of get to the end of poll
    finals                  final responses since construction
    errors                  error finals by code, since construction
    callback_failures       callback name -> calls that raised, since construction
    figures                 name in the record -> value, of what requests hold besides KV cache blocks
    static_batch            where batches are static, the one that ran, empty when none did; None: batching in flight
    """

    timestamp: str
    iteration: int
    active_requests: int
    max_requests: int
    memory: MemoryUsage
    kv_cache: KvCacheUsage
    micro_batch_id: int
    scheduled_requests: int = 0
    context_requests: int = 0
    generation_requests: int = 0
    paused_requests: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    discarded_tokens: int = 0
    steps_in_flight: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    monotonic_seconds: float = 0.0
    new_requests: int = 0
    refused_requests: int = 0
    prompt_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    oldest_wait_seconds: float = 0.0
    started_requests: int = 0
    queue_seconds: float = 0.0
    longest_queue_seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    callback_seconds: float = 0.0
    iteration_seconds: float = 0.0
    finals: int = 0
    failed_steps: int = 0
    clamped_requests: int = 0
    unaddressable_items: int = 0
    errors: dict[ErrorCode, int] = field(default_factory=dict)
    callback_failures: dict[str, int] = field(default_factory=dict)
    dispatch: str = "torch"
    figures: dict[str, int] = field(default_factory=dict)
    static_batch: StaticBatchStats | None = None
