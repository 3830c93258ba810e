"""One iteration in numbers."""

from dataclasses import dataclass, field

from ..names import ErrorCode
from ..seams import MemoryUsage


@dataclass(frozen=True, slots=True)
class KvCacheStats:
    """Blocks of the pool while the step ran: `free + live + cached == max`."""

    max_blocks: int
    free_blocks: int
    live_blocks: int
    cached_blocks: int
    tokens_per_block: int
    reused_blocks: int


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration that had an active request. Counts describe the step as it was launched.

    iteration               rises by one with every record
    active_requests         when the step was planned, before its results were harvested
    scheduled, context, generation, paused   requests of this iteration's plan
    context_tokens          prompt tokens computed
    generated_tokens        tokens that were appended to a request
    recomputed_tokens       tokens of paused requests that will have to be computed again, since construction
    queued_requests         accepted, waiting for a place among the active ones
    callback_seconds        inside the user's callbacks since the last record
    iteration_seconds       from the start of get to the end of poll
    finals                  final responses since construction
    errors                  error finals by code, since construction
    callback_failures       callback name -> calls that raised, since construction
    """

    timestamp: str
    iteration: int
    active_requests: int
    max_requests: int
    memory: MemoryUsage
    kv_cache: KvCacheStats
    micro_batch_id: int
    scheduled_requests: int = 0
    context_requests: int = 0
    generation_requests: int = 0
    paused_requests: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    queued_requests: int = 0
    callback_seconds: float = 0.0
    iteration_seconds: float = 0.0
    finals: int = 0
    failed_steps: int = 0
    clamped_requests: int = 0
    unaddressable_items: int = 0
    errors: dict[ErrorCode, int] = field(default_factory=dict)
    callback_failures: dict[str, int] = field(default_factory=dict)
    dispatch: str = "torch"
