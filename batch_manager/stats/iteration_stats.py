"""The statistics of one iteration."""

from dataclasses import dataclass, field

from ..kv.kv_cache_manager import KvCacheUsage
from ..names import ErrorCode
from ..seams import MemoryUsage


@dataclass(slots=True)    # a frozen dataclass takes several microseconds longer to construct
class IterationStats:
    """The statistics of one iteration.

    They describe the step that the iteration launched. Only `generated_tokens` is about the step that the iteration
    read.

    iteration               rises by one with every record
    active_requests         number of active requests when the step was planned
    of_step                 name in the record -> value, for the statistics of the batching scheme about the step
    generated_tokens        tokens appended to requests
    recomputed_tokens       context tokens computed again after pauses, without those in reused blocks; since
                            construction
    discarded_tokens        computed tokens that were dropped, since construction: those of requests that ended
                            before their step was read, and those of rows that ran on the missing results of a
                            failed step
    steps_in_flight         steps in flight at the end of the iteration
    queued_requests, queued_tokens   numbers of waiting requests and of their prompt tokens
    monotonic_seconds       time of the engine's clock
    new_requests, refused_requests   requests accepted and requests refused since the last record
    prompt_tokens           prompt tokens of accepted requests, since construction
    lookup_tokens, hit_tokens   prompt tokens looked up in the cache, and those found in it, since construction
    oldest_wait_seconds     time since the arrival of the first live request that was in no step yet, in the order
                            of acceptance. 0: no such request
    started_requests, queue_seconds, longest_queue_seconds   since the last record: requests in a step for the first
                            time, the sum of their times from arrival to this step, and the longest of these times
    reasons                 name of a statistic, such as "Finals Length" -> final responses for this reason, since
                            construction; finals with an error are not counted
    callback_seconds        time inside the user's callbacks since the last record
    iteration_seconds       time from the end of get to the record
    finals                  final responses since construction
    errors                  error code -> final responses with this code, since construction
    callback_failures       name of a callback, hook or method of the backend -> calls that raised or returned an
                            unusable value, since construction
    figures                 name in the record -> value, for statistics of the backend and of resources besides blocks
    """

    timestamp: str
    iteration: int
    active_requests: int
    max_requests: int
    memory: MemoryUsage
    kv_cache: KvCacheUsage
    of_step: dict[str, int]
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
