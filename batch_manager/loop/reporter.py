"""Reports an iteration: statistics to the statistics callback, and a trace to the trace hook."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from math import inf
from operator import index
from typing import Any, Protocol

from ..config import Limits
from ..seams import Clock, MemoryUsage, ModelBackend, integers
from ..stats.stats_json import to_json
from ..stats.trace import IterationTrace
from .batch_scheme import BatchScheme
from .callbacks import GuardedCallbacks
from .iteration_record import IterationRecord


class StatisticsOwner(Protocol):
    """An object that counts something for the statistics."""

    def figures(self) -> Mapping[str, int | str]:
        """Return its statistics for the next record: key -> value. Only keys of a Resource are not in STATISTICS."""
        ...


class Reporter:
    """Sends the statistics and the trace of an iteration.

    wants_trace   whether there is a trace hook
    """

    def __init__(self, *, callbacks: GuardedCallbacks, backend: ModelBackend, clock: Clock, limits: Limits,
                 scheme: BatchScheme, trace: Callable[[IterationTrace], None] | None, owners: Sequence[StatisticsOwner],
                 other_settings: Mapping[str, int | str], others_with_memory: Sequence[Any] = ()) -> None:
        """
        others_with_memory   what has `memory_usage` besides the backend
        owners           give their statistics to each record, before those of the backend
        other_settings   name -> value of the settings that a trace has beside the limits and the scheme
        """
        self._callbacks = callbacks
        self._backend, self._others_with_memory = backend, others_with_memory
        self._clock = clock
        self._scheme = scheme
        self._figures = [owner.figures for owner in owners]
        self._max_requests = limits.max_num_sequences
        self._settings = {**settings_of(limits), "static_batching": scheme.is_static, **other_settings}
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
            record.finished_at_s, record.room, self._settings, record.form, record.obstacles)
        self._settings = {}    # the first trace has them
        hook = self._trace
        assert hook is not None
        with self._in_trace:
            hook(trace)

    def report(self, record: IterationRecord) -> None:
        """Call the statistics callback, if there is one, with the figures of all owners."""
        if not self._callbacks.wants_stats:
            return
        assert record.kv_cache is not None
        now = self._clock.monotonic()
        memory, of_backend = self._memory_now(), self._figures_now()    # before the failed calls are counted
        statistics: dict[str, int | str] = {
            "Timestamp": self._clock.timestamp(),
            "Monotonic Microseconds": round(now * 1e6),
            "Iteration Counter": record.number,
            "Iteration Latency Microseconds": round(max(now - record.started_at, 0.0) * 1e6),
            "Active Request Count": record.active_requests,
            "Max Request Count": self._max_requests,
            "Generated Tokens": record.generated_tokens,
            "Runtime GPU Memory Usage": memory.gpu,
            "Runtime CPU Memory Usage": memory.cpu,
            "Runtime Pinned Memory Usage": memory.pinned,
            "Kernel Dispatch": self._backend.info.dispatch,
        }
        statistics |= self._scheme.figures(record)
        statistics |= record.kv_cache.figures()
        for figures in self._figures:
            statistics |= figures()
        statistics |= of_backend
        self._callbacks.return_stats(to_json(statistics).decode())

    def _figures_now(self) -> dict[str, int]:
        """Return the statistics of the backend, name -> value; empty if the backend has none or raises."""
        figures = self._figures_of_backend
        if figures is not None:
            with self._in_figures:
                return integers(figures())
        return {}

    def _memory_now(self) -> MemoryUsage:
        """Return the memory use of the engine; zeros if the backend raises, so that no request fails."""
        with self._in_memory_usage:
            gpu = cpu = pinned = 0
            for owner in (self._backend, *self._others_with_memory):
                memory = owner.memory_usage()
                gpu, cpu, pinned = gpu + index(memory.gpu), cpu + index(memory.cpu), pinned + index(memory.pinned)
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

