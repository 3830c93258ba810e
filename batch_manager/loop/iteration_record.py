"""The record of an iteration. The loop fills it while the iteration runs, and the reporter reads it."""

from collections.abc import Mapping
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
    arrived, finished  ids of the requests that were accepted, and of accepted requests that ended
    arrived_at_s       when each request of `arrived` arrived, in seconds of the engine's clock
    finished_at_s      when the final of each request of `finished` was sent, in seconds of the engine's clock; filled
                       for traces only
    room               how many further requests could become active at the start of the iteration, less the queued
                       requests; -1: unbounded; None without a trace
    end_reasons        reason -> ids of the requests that got their final response; filled for traces only
    waiting            reason -> ids of the active requests that the plan left out; filled for traces only
    form, obstacles    form of the step, and earlier form -> what kept the step out of it; filled for traces only
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
    arrived: tuple[int, ...] = ()
    arrived_at_s: tuple[float, ...] = ()
    finished: tuple[int, ...] = ()
    finished_at_s: tuple[float, ...] = ()
    room: int | None = None
    waiting: dict[str, tuple[int, ...]] = field(default_factory=dict)
    end_reasons: dict[str, tuple[int, ...]] = field(default_factory=dict)
    form: str = ""
    obstacles: Mapping[str, str] = field(default_factory=dict)
