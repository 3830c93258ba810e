"""What one iteration did: filled while it runs, then handed to the reporter."""

from dataclasses import dataclass, field

from ..kv.kv_cache_manager import KvCacheUsage
from ..scheduling.interfaces import SchedulerOutput
from ..stats.iteration_stats import StaticBatchStats

NO_PLAN = SchedulerOutput()


@dataclass(slots=True)
class IterationRecord:
    """One iteration. It describes the step at its launch: which requests were active, which ran, which blocks were in
    use.

    number             rises by one with every record that is reported
    micro_batch_id     which of the micro-batches in flight it launches
    started_at         seconds, of the engine's clock
    active_requests    when the step was planned
    plan               what was carried out; empty where nothing was launched
    chunks             (request id, first position, tokens) of each context chunk
    kv_cache           None until the step was launched
    static_batch       where batches are static, the one that ran, empty where none did; None: batching in flight
    generated_tokens   appended to requests
    had_refusals       items were refused
    figures            name of a statistic -> value, of what requests hold besides KV cache blocks
    arrived, finished  ids of the requests that were accepted, and of those that ended after they ran
    waiting            reason -> ids of the active requests that are in no step, where traces are wanted
    """

    number: int
    micro_batch_id: int
    started_at: float
    active_requests: int = 0
    plan: SchedulerOutput = NO_PLAN
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    kv_cache: KvCacheUsage | None = None
    static_batch: StaticBatchStats | None = None
    generated_tokens: int = 0
    had_refusals: bool = False
    figures: dict[str, int] = field(default_factory=dict)
    arrived: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    waiting: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """Counts since construction, and current values.

    recomputed_tokens   computed tokens that pauses discarded
    discarded_tokens    tokens of requests that had ended when their step was read
    steps_in_flight     launched and not read
    queued_requests, queued_tokens   accepted, waiting to become active
    accepted, refused   items
    prompt_tokens       of accepted requests
    """

    recomputed_tokens: int = 0
    discarded_tokens: int = 0
    steps_in_flight: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    accepted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    failed_steps: int = 0
    clamped_requests: int = 0
    unaddressable_items: int = 0
