"""Counts what an iteration did, and reports it: statistics for the callback, a trace for pictures."""

from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING

from ..handover import ScheduledBatch
from ..kv.kv_cache_manager import KvCacheUsage
from ..scheduling.interfaces import SchedulerOutput
from ..seams import MemoryUsage
from ..stats.iteration_stats import IterationStats, StaticBatchStats
from ..stats.stats_json import to_json
from ..stats.trace import IterationTrace
from .static_batch import StaticBatch
from .step_runner import StepRunner

if TYPE_CHECKING:
    from .generation_loop import GenerationLoop


class Reporter:
    """One record for every iteration that had an active request; none when idle.

    The record describes the step as it was launched: who was active, who ran, which blocks were in use.

    iteration           number of the record being made
    recomputed_tokens   tokens that pauses threw away, since construction
    generated_tokens    tokens appended to requests, since construction
    """

    def __init__(self, loop: "GenerationLoop", runner: StepRunner, trace: Callable[[IterationTrace], None] | None,
                 flush_when_idle: bool, num_micro_batches: int, static_batch: StaticBatch | None) -> None:
        self._loop = loop
        self._runner = runner
        self._trace = trace
        self._flush_when_idle = flush_when_idle
        self._num_micro_batches = num_micro_batches
        self._static_batch = static_batch
        self._started = 0.0
        self._plan = SchedulerOutput()
        self._chunks: list[tuple[int, int, int]] = []
        self._active_requests = 0
        self._kv_cache: KvCacheUsage | None = None
        self._generated_before = 0
        self.iteration = 0
        self.recomputed_tokens = 0
        self.generated_tokens = 0

    @property
    def micro_batch_id(self) -> int:
        """Which of the micro-batches in flight this iteration launches."""
        return self.iteration % self._num_micro_batches

    def begin(self, now: float) -> None:
        self._started = now
        self._plan = SchedulerOutput()
        self._chunks = []
        self._kv_cache = None
        self._generated_before = self.generated_tokens

    def note_launch(self, plan: SchedulerOutput, batch: ScheduledBatch | None) -> None:
        """Remember the plan and what became of it while its step runs; afterwards its requests have moved on."""
        self._plan = plan
        if batch is not None:
            self._chunks = [(request.request_id, work.start, len(work.token_ids))
                            for request, work in zip(plan.context_requests, batch.context, strict=True)]
        self._active_requests = len(self._loop.active)
        self._kv_cache = self._loop.kv.usage()

    def end(self, had_active: bool) -> None:
        """Close the iteration. Nothing is reported for one without an active request."""
        finished, arrived = self._loop.finals.take_ended(), self._loop.intake.take_arrived()
        if not had_active:
            return
        if self._kv_cache is None:    # the plan was refused; nothing ran
            self._active_requests = len(finished)
            self._kv_cache = self._loop.kv.usage()
        if self._trace is not None:
            plan = self._plan
            trace = IterationTrace(
                self.iteration, tuple(self._chunks), tuple(r.request_id for r in plan.generation_requests),
                tuple(r.request_id for r in plan.paused_requests), finished, arrived)
            try:
                self._trace(trace)
            except BaseException as error:  # noqa: B036  as in a callback
                self._loop.callbacks.note_failure("trace", error)
        self._report()
        if self._flush_when_idle and self._loop.is_empty:
            self.begin(self._loop.clock.monotonic())
            self._active_requests = 0
            self._kv_cache = self._loop.kv.usage()
            self._report()

    def _report(self) -> None:
        loop, plan = self._loop, self._plan
        if loop.callbacks.wants_stats:
            contexts, generations = len(plan.context_requests), len(plan.generation_requests)
            stats = IterationStats(
                timestamp=loop.clock.timestamp(),
                iteration=self.iteration,
                active_requests=self._active_requests,
                max_requests=loop.limits.max_num_sequences,
                memory=self._memory_now(),
                kv_cache=self._kv_cache,
                micro_batch_id=self.micro_batch_id,
                scheduled_requests=contexts + generations,
                context_requests=contexts,
                generation_requests=generations,
                paused_requests=len(plan.paused_requests),
                context_tokens=sum(size for _, _, size in self._chunks),
                generated_tokens=self.generated_tokens - self._generated_before,
                recomputed_tokens=self.recomputed_tokens,
                queued_requests=len(loop.intake),
                callback_seconds=loop.callbacks.take_seconds(),
                iteration_seconds=loop.clock.monotonic() - self._started,
                finals=loop.finals.num_sent,
                failed_steps=self._runner.num_failed_steps,
                clamped_requests=loop.intake.num_warnings,
                unaddressable_items=loop.intake.unaddressable,
                errors=loop.finals.errors,
                callback_failures=loop.callbacks.failures,
                dispatch=loop.backend.info.dispatch,
                static_batch=self._static_batch_now(),
            )
            loop.callbacks.return_stats(to_json(stats))
        self.iteration += 1

    def _memory_now(self) -> MemoryUsage:
        """Zeros from a backend that does not know: a number for people to look at costs no request."""
        try:
            memory = self._loop.backend.memory_usage()
            gpu, cpu, pinned = (index(number) for number in (memory.gpu, memory.cpu, memory.pinned))
            if not 0 <= min(gpu, cpu, pinned) <= max(gpu, cpu, pinned) < 2**63:
                raise ValueError("no number of bytes")
        except BaseException as error:
            self._loop.callbacks.note_failure("memory_usage", error)
            return MemoryUsage()
        return MemoryUsage(gpu, cpu, pinned)

    def _static_batch_now(self) -> StaticBatchStats | None:
        if self._static_batch is None:
            return None
        ran = self._plan.context_requests or self._plan.generation_requests
        return self._static_batch.stats if ran else StaticBatchStats()
