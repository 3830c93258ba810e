"""The record of an iteration. The loop fills it while the iteration runs, and the reporter reads it."""

from dataclasses import dataclass, field

from ..kv.kv_cache_manager import KvCacheUsage
from ..scheduling.interfaces import SchedulerOutput

NO_PLAN = SchedulerOutput()


@dataclass(slots=True)
class IterationRecord:
    """What one iteration did, for statistics and traces.

    Fields about a step describe the step that the iteration launched. Only `generated_tokens` is about the step that
    the iteration read.

    number             rises by one with every reported record
    micro_batch_id     number of the micro-batch that the iteration launches
    started_at         start of the iteration, in seconds of the engine's clock
    active_requests    number of active requests when the step was planned
    plan               the executed plan; empty if nothing was launched
    chunks             (request id, first position, number of tokens) of each context chunk
    kv_cache           use of the KV cache after the plan's blocks were taken, or, without a plan, at the end of the
                       iteration; None before that time
    generated_tokens   tokens appended to requests
    had_refusals       whether items were refused
    figures            name -> value of the statistics of resources other than KV cache blocks, such as adapters
    arrived, finished  ids of the requests that were accepted, and of accepted requests that ended
    arrived_at_s       when each request of `arrived` arrived, in seconds of the engine's clock
    finished_at_s      when the final of each request of `finished` was sent, in seconds of the engine's clock; filled
                       for traces only
    room               how many further requests could become active at the start of the iteration, less the queued
                       requests; -1: unbounded; None without a trace
    end_reasons        reason -> ids of the requests that got their final response; filled for traces only
    waiting            reason -> ids of the active requests that the plan left out; filled for traces only
    """

    number: int
    micro_batch_id: int
    started_at: float
    active_requests: int = 0
    plan: SchedulerOutput = NO_PLAN
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    kv_cache: KvCacheUsage | None = None
    generated_tokens: int = 0
    had_refusals: bool = False
    figures: dict[str, int] = field(default_factory=dict)
    arrived: tuple[int, ...] = ()
    arrived_at_s: tuple[float, ...] = ()
    finished: tuple[int, ...] = ()
    finished_at_s: tuple[float, ...] = ()
    room: int | None = None
    waiting: dict[str, tuple[int, ...]] = field(default_factory=dict)
    end_reasons: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """Counts since the construction of the loop, and current values, for statistics.

    recomputed_tokens   context tokens computed again after a pause; tokens in reused blocks do not count
    discarded_tokens    tokens of requests that had ended when their step was read, and of void rows. A void row is
                        a row of a step that ran on the missing results of a failed step
    steps_in_flight     steps that were launched and not yet read
    queued_requests, queued_tokens   accepted requests that wait to become active, and their prompt tokens
    accepted, refused   numbers of accepted and of refused items
    prompt_tokens       prompt tokens of accepted requests
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
