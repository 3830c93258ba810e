"""Reports an iteration: statistics to the statistics callback, and a trace to the trace hook."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from math import inf
from operator import index

from ..config import Limits
from ..seams import Clock, MemoryUsage, ModelBackend
from ..stats.iteration_stats import IterationStats
from ..stats.stats_json import to_json
from ..stats.trace import IterationTrace
from .batch_scheme import BatchScheme
from .callbacks import GuardedCallbacks
from .iteration_record import IterationRecord, Totals
from .timings import Timings


class Reporter:
    """Sends the statistics and the trace of an iteration.

    wants_trace   whether there is a trace hook
    """

    def __init__(self, *, callbacks: GuardedCallbacks, backend: ModelBackend, clock: Clock, limits: Limits,
                 scheme: BatchScheme, trace: Callable[[IterationTrace], None] | None, timings: Timings,
                 other_settings: Mapping[str, int | str]) -> None:
        """
        other_settings   name -> value of the settings that a trace has beside the limits
        """
        self._callbacks = callbacks
        self._backend = backend
        self._clock = clock
        self._timings = timings
        self._scheme = scheme
        self._accepted = self._refused = 0    # in the records so far
        self._max_requests = limits.max_num_sequences
        self._settings = settings_of(limits) | dict(other_settings)    # empty once they are in a trace
        self._trace = trace
        self._last_started_at = -inf
        self.wants_trace = trace is not None
        self._figures_of_backend = getattr(backend, "figures", None)
        self._in_trace, self._in_memory_usage, self._in_figures = map(
            callbacks.guard.containing, ("trace", "memory_usage", "figures"))

    def trace(self, record: IterationRecord, phases_us: Mapping[str, int], queued_requests: int) -> None:
        """Call the trace hook. Requires `wants_trace`."""
        plan = record.plan
        kv_cache = record.kv_cache
        assert kv_cache is not None
        self._last_started_at = max(self._last_started_at, record.started_at)    # a host's clock may be set back
        trace = IterationTrace(
            record.number, tuple(record.chunks), tuple([r.request_id for r in plan.generation_requests]),
            tuple([r.request_id for r in plan.paused_requests]), record.finished, record.arrived,
            self._last_started_at, phases_us, record.waiting, queued_requests, kv_cache.live_blocks,
            kv_cache.cached_blocks, kv_cache.free_blocks, record.end_reasons, record.arrived_at_s,
            record.finished_at_s, record.room, self._settings)
        self._settings = {}
        hook = self._trace
        assert hook is not None
        with self._in_trace:
            hook(trace)

    def report(self, record: IterationRecord, totals: Totals) -> None:
        """Call the statistics callback, if there is one."""
        callbacks = self._callbacks
        if not callbacks.wants_stats:
            return
        assert record.kv_cache is not None
        unanswered = callbacks.unanswered
        timings, now = self._timings, self._clock.monotonic()
        started, queue_seconds, longest_queue_seconds = timings.take_started() if timings.started else (0, 0.0, 0.0)
        new_requests, refused_requests = totals.accepted - self._accepted, totals.refused - self._refused
        self._accepted, self._refused = totals.accepted, totals.refused
        stats = IterationStats(
            timestamp=self._clock.timestamp(),
            iteration=record.number,
            active_requests=record.active_requests,
            max_requests=self._max_requests,
            memory=self._memory_now(),
            kv_cache=record.kv_cache,
            of_step=self._scheme.figures(record),
            generated_tokens=record.generated_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            discarded_tokens=totals.discarded_tokens,
            steps_in_flight=totals.steps_in_flight,
            queued_requests=totals.queued_requests,
            queued_tokens=totals.queued_tokens,
            monotonic_seconds=now,
            new_requests=new_requests,
            refused_requests=refused_requests,
            prompt_tokens=totals.prompt_tokens,
            lookup_tokens=timings.lookup_tokens,
            hit_tokens=timings.hit_tokens,
            oldest_wait_seconds=timings.oldest_wait_s(now) if timings.waiting else 0.0,
            started_requests=started,
            queue_seconds=queue_seconds,
            longest_queue_seconds=longest_queue_seconds,
            reasons=totals.reasons,
            callback_seconds=callbacks.take_seconds(),
            iteration_seconds=max(now - record.started_at, 0.0),
            finals=unanswered.num_sent,
            failed_steps=totals.failed_steps,
            clamped_requests=totals.clamped_requests,
            unaddressable_items=totals.unaddressable_items,
            errors=unanswered.errors,
            callback_failures=callbacks.guard.failures,
            dispatch=self._backend.info.dispatch,
            figures=record.figures if self._figures_of_backend is None else record.figures | self._figures_now(),
        )
        callbacks.return_stats(to_json(_record(stats)).decode())

    def _figures_now(self) -> dict[str, int]:
        """Return the statistics of the backend, name -> value; empty if the backend has none or raises."""
        figures = self._figures_of_backend
        if figures is not None:
            with self._in_figures:
                return {str(name): index(value) for name, value in figures().items()}
        return {}

    def _memory_now(self) -> MemoryUsage:
        """Return the memory use of the backend; zeros if the backend raises, so that no request fails."""
        with self._in_memory_usage:
            memory = self._backend.memory_usage()
            gpu, cpu, pinned = map(index, (memory.gpu, memory.cpu, memory.pinned))
            if not 0 <= min(gpu, cpu, pinned) <= max(gpu, cpu, pinned) < 2**63:
                raise ValueError("not a number of bytes")
            return MemoryUsage(gpu, cpu, pinned)
        return MemoryUsage()


def settings_of(limits: Limits) -> dict[str, int | str]:
    """Return the limits as a trace has them: name -> value. An unbounded max_num_sequences is -1."""
    settings = {each.name: getattr(limits, each.name) for each in fields(limits)}
    if settings.pop("unbounded_sequences"):
        settings["max_num_sequences"] = -1
    return {name: value.name if isinstance(value, Enum) else value for name, value in settings.items()}


def _record(stats: IterationStats) -> dict[str, int | str]:
    """Return the statistics by name.

    The first group of names is TensorRT-LLM's, spelled identically. Numbers are integers, times are in microseconds.
    """
    kv = stats.kv_cache
    record: dict[str, int | str] = {
        "Timestamp": stats.timestamp,
        "Iteration Counter": stats.iteration,
        "Active Request Count": stats.active_requests,
        "Max Request Count": stats.max_requests,
        "Runtime GPU Memory Usage": stats.memory.gpu,
        "Runtime CPU Memory Usage": stats.memory.cpu,
        "Runtime Pinned Memory Usage": stats.memory.pinned,
        "Max KV cache blocks": kv.max_blocks,
        # TensorRT-LLM has no cached blocks in this sense; they can be evicted at any time, so they count as free.
        "Free KV cache blocks": kv.free_blocks + kv.cached_blocks,
        "Used KV cache blocks": kv.live_blocks,
        "Tokens per KV cache block": kv.tokens_per_block,
        "Reused KV cache blocks": kv.reused_blocks,
        **stats.of_step,

        "Cached KV cache blocks": kv.cached_blocks,
        "Host KV cache blocks": kv.host_blocks,
        "Used Host KV cache blocks": kv.used_host_blocks,
        "Queued Requests": stats.queued_requests,
        "Generated Tokens": stats.generated_tokens,
        "Recomputed Tokens": stats.recomputed_tokens,
        "Discarded Tokens": stats.discarded_tokens,
        "Iterations In Flight": stats.steps_in_flight,
        "Final Responses": stats.finals,
        "Failed Steps": stats.failed_steps,
        "Clamped Requests": stats.clamped_requests,
        "Unaddressable Items": stats.unaddressable_items,
        "Callback Time Microseconds": round(stats.callback_seconds * 1e6),
        "Iteration Latency Microseconds": round(stats.iteration_seconds * 1e6),
        "Kernel Dispatch": stats.dispatch,
        "Monotonic Microseconds": round(stats.monotonic_seconds * 1e6),
        "New Requests": stats.new_requests,
        "Refused Requests": stats.refused_requests,
        "Accepted Prompt Tokens": stats.prompt_tokens,
        "Cache Lookup Tokens": stats.lookup_tokens,
        "Cache Hit Tokens": stats.hit_tokens,
        "Queued Tokens": stats.queued_tokens,
        "Oldest Wait Microseconds": round(stats.oldest_wait_seconds * 1e6),
        "Started Requests": stats.started_requests,
        "Queue Time Microseconds": round(stats.queue_seconds * 1e6),
        "Longest Queue Time Microseconds": round(stats.longest_queue_seconds * 1e6),
        **stats.reasons,
    }
    for code, count in stats.errors.items():
        record[f"Errors {code.value}"] = count
    for name, count in stats.callback_failures.items():
        record[f"Failed {name} Callbacks"] = count
    return record | stats.figures
