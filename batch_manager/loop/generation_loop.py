"""The generation loop. The phases of an iteration are fetch, schedule, claim, start, finish, advance, respond, poll and
report."""

from collections.abc import Callable, Sequence
from typing import Any

from ..config import Limits
from ..contained_log import log
from ..errors import (
    BatchManagerError,
    OutOfResourceError,
    SchedulerContractError,
    counted,
    type_name,
    where_raised,
)
from ..guard import ForeignCodeError
from ..handover import ScheduledBatch, StepOutput
from ..kv.event_log import EventLog
from ..kv.kv_cache_manager import KvCacheManager
from ..kv.peft_cache_manager import PeftCacheManager
from ..names import ErrorCode, FinishReason
from ..requests.inference_request import InferenceRequest
from ..responses.deliveries import Deliveries
from ..scheduling.contract import check_plan, with_lists
from ..scheduling.interfaces import RequestScheduler, SchedulerOutput
from ..scheduling.starvation import StarvationCheck
from ..scheduling.waiting import waiting_reasons
from ..seams import Clock, ModelBackend
from ..stats.trace import IterationTrace
from ..steps.resources import Resource, Resources
from ..steps.runner import StepRunner
from ..steps.window import StepInFlight, StepWindow
from .active_requests import ActiveRequests
from .advance import Outcome, advance
from .batch_scheme import BatchScheme
from .callbacks import GuardedCallbacks
from .intake import Intake
from .iteration_record import IterationRecord
from .phase_times import PhaseTimes
from .preparing import Preparing
from .reporter import Reporter

FinishedStep = tuple[StepInFlight, StepOutput]

RESPONSES_AT_ONCE = 32    # built before they are sent; few enough not to trigger Python's garbage collector


class GenerationLoop:
    """Runs iterations. All calls must come from one thread, which may be any thread.

    Up to `limits.window_depth` steps are in flight. An iteration launches the next step before it reads the oldest one.
    steps/window.py defines which requests the steps may share.

    A failed step ends only the requests that also fail in a batch of one sequence (StepRunner). A scheduler that
    breaks its contract ends the active requests. If `step` raises, the worker calls `fail`, which ends all
    requests.

    ranks       the other ranks, if the backend leads some; None: there is one rank
    wake        always None: the worker's own
    failure     error of the failed engine, with which every request is answered; None while the engine runs
    iteration   number of the next statistics record
    stored      the traffic with a store of blocks; None: there is no store
    kv_events   the log of what the cache can find; None without a hook or a buffer for its events
    """

    def __init__(self, *, limits: Limits, callbacks: GuardedCallbacks, intake: Intake, scheduler: RequestScheduler,
                 kv_cache_manager: KvCacheManager, backend: ModelBackend, deliveries: Deliveries, clock: Clock,
                 flush_stats_when_idle: bool = False, trace: Callable[[IterationTrace], None] | None = None,
                 scheme: BatchScheme, resources: Sequence[Resource] = (),
                 adapters: PeftCacheManager | None = None, kv_events: EventLog | None = None) -> None:
        self.limits = limits
        self.callbacks = callbacks
        self.unanswered = callbacks.unanswered
        self.intake = intake
        self.scheduler = scheduler
        self.kv = kv_cache_manager
        self.adapters = adapters
        self.kv_events = kv_events
        self.backend = backend
        self.clock = clock
        self.active = ActiveRequests()
        self.failure: BatchManagerError | None = None
        self.ranks, self.wake = getattr(backend, "leader", None), None
        self.iteration = 0
        self.deliveries = deliveries
        self._scheme = scheme
        self.timings = intake.timings
        self._resources = Resources(kv_cache_manager, limits.max_seq_len,
                                    resources if adapters is None else (*resources, adapters))
        self._runner = StepRunner(backend, self._resources.device_work, limits.vocab_size, callbacks.guard)
        self.window = StepWindow(self._runner, self._resources, limits.window_depth, limits.runs_ahead)
        self.finals = scheme.finals(callbacks, self.active, intake, self._resources, deliveries, self.window)
        self.stored = intake.waiting.stored
        if self.stored is not None:
            self.stored.attach(self._resources.device_work, self._runner)
            self.finals.hand_over = getattr(self.stored, "hand_over", None)
        self._starvation = StarvationCheck(kv_cache_manager, limits)
        self._flush_stats_when_idle = flush_stats_when_idle
        self.reporter = Reporter(
            callbacks=callbacks, backend=backend, clock=clock, limits=limits, trace=trace, scheme=scheme,
            others_with_memory=[each for each in self._resources.others if hasattr(each, "memory_usage")],
            owners=(intake, self.timings, self.window, self._runner, callbacks, self._resources,
                    *(() if kv_events is None else (kv_events,)),
                    *(() if self.stored is None else (self.stored,))),
            other_settings={"enable_block_reuse": kv_cache_manager.enable_block_reuse,
                            "max_admissions_per_iteration": intake.max_admissions_per_iteration})
        self._phase_times = PhaseTimes(self, clock) if self.reporter.wants_trace else None
        self.finals.end_reasons = {} if self.reporter.wants_trace else None
        self._check_backend: Callable[[], None] | None = getattr(backend, "check", None)
        self._leave_ranks: Callable[[str], None] | None = getattr(backend, "leave", None)
        self._in_scheduler = callbacks.guard.raising("schedule_request", passing=SchedulerContractError)

    def step(self, *, accept_new: bool) -> bool:
        """Run one iteration. Returns False if there was nothing to do.

        accept_new   whether to call the get callback
        """
        room = self._room()
        if self.stored is not None:
            self.stored.begin()
        if accept_new:
            self.intake.ask(room)
        if self.is_empty:    # kept short: an idle worker runs this two hundred times a second
            self.window.drop_all()
            if self._check_backend is not None and self.failure is None:
                self._check_backend()
            self.callbacks.poll_stops()
            return self.stored is not None and self.failure is None and self._serve_store()
        record = self._fetch(room)
        try:
            if self.stored is not None:
                self.stored.plan()
            plan = self._schedule(record)
            batch = self._claim(plan, record)
            self._start(batch, plan, record)
            if self.stored is not None and batch is None and not self.window:
                self.stored.run_operations()
            finished = self._finish(batch)
            outcome = self._advance(finished, record)
        except SchedulerContractError as error:
            outcome = self._answer_all_active(error)
        self._respond(outcome)
        self._poll_stops()
        self.callbacks.after_responses()
        return self._report(record)

    def _serve_store(self) -> bool:
        """Save blocks while nothing else is to be done. Returns whether there was something to do."""
        assert self.stored is not None
        did_something = self.stored.run_operations()
        if self.kv_events is not None:
            self.callbacks.kv_events(self.kv_events.collect())
        return did_something

    @property
    def has_room(self) -> bool:
        """Whether one more request may become active."""
        room = self._room()
        return room is None or room > 0

    @property
    def preparing(self) -> Preparing | None:
        """What checks the adapters of requests; None without a cache for adapters."""
        return None if self.adapters is None else self.intake.waiting.preparing

    @property
    def num_alive(self) -> int:
        """The number of live requests. Any thread may read it."""
        return self.intake.num_alive

    @property
    def is_empty(self) -> bool:
        """Whether every fetched item has had its final response."""
        items = self.unanswered
        return not (items.alive or items.refusals or items.undecided or self.callbacks.fetched)

    def is_done(self, *, draining: bool, aborting: bool) -> bool:
        """Whether the worker may end: it is aborted, or it drains and is empty. Arguments as in worker.EngineLoop."""
        if self.stored is not None and self.failure is None and self.stored.is_saving and not aborting:
            return False
        return aborting or ((draining or self.intake.is_terminating) and self.is_empty)

    def end(self, error: BatchManagerError, health: Callable[[], dict[str, Any]]) -> None:
        """Answer the rest with `error`, close the backend, and call the hook at_end with the result of `health`.

        An exception of a custom backend is counted and logged, and the worker ends all the same.
        """
        self.answer_the_rest(error)
        owners: list[Any] = [self.backend, *(each for each in self._resources.others if hasattr(each, "close"))]
        for owner in owners:
            with self.callbacks.guard.containing("close", kind="method of the backend"):
                owner.close()
        self.callbacks.at_end(health)

    def check(self, request: InferenceRequest) -> None:
        """Raise the error with which the request would be refused. Can be called from any thread."""
        self.intake.admission_elsewhere.admit(request)

    def health(self) -> dict[str, Any]:
        """The part of GptManager.health that the loop knows. Can be called from any thread."""
        alive = self.intake.num_alive    # read once: a request that is leaving the queue is counted nowhere else
        queued, failure = min(len(self.intake), alive), self.failure
        return {
            "state": "FAILED" if failure is not None else "DRAINING" if self.intake.is_terminating else "RUNNING",
            "failure": "" if failure is None else failure.response_text(),
            "active_requests": alive - queued,
            "queued_requests": queued,
            "iterations": self.iteration,
            "final_responses": self.finals.num_sent,
            "errors": {code.value: count for code, count in self.finals.errors.copy().items()},
            "unaddressable_items": self.intake.unaddressable,
            "callback_failures": dict(self.callbacks.failures),
        }

    def answer_the_rest(self, error: BatchManagerError) -> None:
        """Answer each live request and each fetched item with `error`. Afterwards the loop is empty.

        If the method raises, the next call answers the remaining items.
        """
        self.window.forget()
        if self.failure is None:
            self._release_everything()
        self.finals.fail_everything(error)
        while not self.is_empty:
            self.intake.fetch(0, self.active.__contains__, error)
            self.finals.answer_refusals()
        self.callbacks.after_responses()
        if self.kv_events is not None:
            self.callbacks.kv_events(self.kv_events.collect())
        self.intake.waiting.preparing.close()
        if self.stored is not None:
            self.stored.close()

    def _release_everything(self) -> None:
        """Release the resources of all requests before their final callbacks run.

        Must not be called for a failed engine.
        """
        try:
            for request in self.active:
                self._resources.release(request)
        except BaseException:    # the finals matter more
            log.exception("the resources of active requests could not be released at the end")

    def fail(self, error: BatchManagerError) -> None:
        """Mark the engine as failed and answer every unanswered item.

        All live requests, and all requests that arrive until shutdown, get the error of the first call of this method.
        If the method raises, the next call answers the remaining items.
        """
        if self.failure is None:
            self.failure = error
        self.window.forget()
        self.finals.fail_everything(self.failure)
        self.callbacks.after_responses()
        if self._leave_ranks is not None:
            self._leave_ranks(f"rank 0 failed with {type_name(self.failure)}: {self.failure.fact}")

    # fetch

    def _room(self) -> int | None:
        """The number of further requests that may become active; None: unbounded."""
        limits = self.limits
        return None if limits.unbounded_sequences else max(limits.max_num_sequences - len(self.active.in_order), 0)

    def _fetch(self, room: int | None) -> IterationRecord:
        record = IterationRecord(self.iteration, self.iteration % self.limits.num_micro_batches,
                                 self.clock.monotonic())
        if self._phase_times is not None:
            record.room = -1 if room is None else max(room - self.intake.waiting.num_requests, 0)
        for admitted in self.intake.fetch(room, self.active.__contains__, self.failure):
            self.active.add(admitted.request)
            self._resources.admit(admitted)
            self.deliveries.admit(admitted)
        record.had_refusals = bool(self.unanswered.refusals or self.intake.waiting.unprepared)
        if self.intake.waiting.unprepared:
            self.finals.answer_refusals()
            for admitted, error in self.intake.waiting.take_unprepared():
                self.finals.fail_waiting(admitted, error.code, str(error))
        if self.intake.came_late:            # a late request must not run; its duplicates are refused while it is live
            self.finals.answer_refusals()
            self._expire()
        record.active_requests = len(self.active.in_order)
        return record

    # schedule, claim, start

    def _schedule(self, record: IterationRecord) -> SchedulerOutput | None:
        """Call the scheduler, check its plan and return the plan.

        Returns None if no request is active, or if a step in flight must be read first. Raises SchedulerContractError
        if the plan breaks a rule.
        """
        if not record.active_requests or self.window.must_be_read:
            return None
        active = list(self.active.in_order)
        blocked = self.window.blocked_request_ids()
        self.kv.inflight_request_ids = blocked
        what = "schedule_request"
        try:
            with self._in_scheduler:
                plan = self.scheduler.schedule_request(active, blocked)
                what = "reading its plan"
                plan = with_lists(plan, len(active))
                if self._pauses_in_flight(plan):
                    return None    # read the step first: requests may end in it, and the pause may become unnecessary
                check_plan(self.scheduler, plan, active, blocked, self.kv, self.limits, self.adapters)
        except ForeignCodeError as failure:    # ends the active requests only
            rule = f"{what} raised {type_name(failure.error)}"
            log.error("the scheduler: %s\n%s", rule, where_raised(failure.error))
            raise SchedulerContractError(self.scheduler, rule) from failure.error
        num_scheduled = len(plan.context_requests) + len(plan.generation_requests)
        if num_scheduled < len(active):
            self._starvation.check(self.scheduler, plan, active, blocked)
            if self.reporter.wants_trace:
                record.waiting = waiting_reasons(plan, active, blocked, self.kv, self.limits, self.adapters,
                                                 is_static=self._scheme.is_static)
        if not (num_scheduled or self.window):
            raise SchedulerContractError(
                self.scheduler,
                f"none of {counted(len(active), 'active request')} is scheduled, and no step is in flight")
        return plan

    def _pauses_in_flight(self, plan: SchedulerOutput) -> bool:
        """Whether the plan pauses a request that is in a step in flight. False if `plan` is no SchedulerOutput."""
        return (isinstance(plan, SchedulerOutput) and bool(plan.paused_requests)
                and self.window.holds_any(plan.paused_requests))

    def _claim(self, plan: SchedulerOutput | None, record: IterationRecord) -> ScheduledBatch | None:
        if plan is None:
            return None
        if plan.paused_requests:
            if self.timings.asking:
                self.timings.note_pauses(plan.paused_requests, self.kv)
            self._resources.pause(plan.paused_requests)
        batch = None
        if plan.context_requests or plan.generation_requests:
            try:
                batch = self._resources.claim(plan, record.number, record.micro_batch_id)
            except OutOfResourceError as error:
                raise SchedulerContractError(self.scheduler, f"its plan exceeds a resource: {error.fact}") from error
            batch = self._scheme.padded(batch, plan)
            if batch.context:
                self.timings.note_contexts(batch, plan.context_requests, self.kv)
                record.chunks = [(request.request_id, work.start, work.end - work.start)
                                 for request, work in zip(plan.context_requests, batch.context, strict=True)]
        record.plan = plan
        record.kv_cache = self.kv.usage()
        return batch

    def _start(self, batch: ScheduledBatch | None, plan: SchedulerOutput | None, record: IterationRecord) -> None:
        if batch is not None and plan is not None:
            self.window.launch(batch, [*plan.context_requests, *plan.generation_requests])
            if self.reporter.wants_trace:
                record.form, record.obstacles = self.window.newest_choice()

    # finish, advance

    def _finish(self, batch: ScheduledBatch | None) -> FinishedStep | None:
        """Read the oldest step in flight and return it with its output.

        Returns None if no step is in flight, or if another step can be launched before the oldest is read.

        batch   the batch that this iteration launched, or None
        """
        window = self.window
        if window.is_full:
            return window.read()
        if not window or batch is not None and not (
                window.runs_ahead and len(window.blocked_request_ids()) >= len(self.active)):
            return None
        return window.read()

    def _advance(self, finished: FinishedStep | None, record: IterationRecord) -> Outcome:
        if finished is None:
            return Outcome()
        flight, output = finished
        outcome = advance(flight.step.batch, output, flight.requests, flight.void, self.deliveries, self._resources,
                          may_have_ended=self.window.depth > 1)
        if self.timings.asking:
            # If a request ended while the step ran, another request may have its id now.
            active = [request for request in flight.requests if self.active.get(request.request_id) is request]
            self.timings.note_tokens(active, flight.void)
        record.generated_tokens = outcome.generated_tokens
        self.window.num_discarded_tokens += outcome.discarded_tokens
        return outcome

    # respond

    def _respond(self, outcome: Outcome) -> None:
        if self.unanswered.refusals:
            self.finals.answer_refusals()
        for request, failure in outcome.failed:
            self.finals.fail(request, failure.code, failure.message, clear_blocks=True)
        for request, reason in outcome.ended:
            self.finals.end(request, reason)
        to_send = outcome.to_send
        for first in range(0, len(to_send), RESPONSES_AT_ONCE):
            self.callbacks.send(self.deliveries.new_tokens(to_send[first:first + RESPONSES_AT_ONCE]))
        self._expire()

    def _expire(self) -> None:
        """End requests whose deadline has passed, as timed out if they have generated tokens, else with an error."""
        expired = self.intake.expired()
        if not expired:
            return
        for admitted in self.intake.waiting.withdraw(expired.keys()):
            self.finals.fail_waiting(admitted, ErrorCode.DEADLINE, expired[admitted.request.request_id])
        for request_id in sorted(expired):
            request = self.active.get(request_id)
            if request is None:
                continue
            if request.total_generated_tokens:
                self.finals.end(request, FinishReason.TIMED_OUT)
            else:
                self.finals.fail(request, ErrorCode.DEADLINE, expired[request_id])

    def _answer_all_active(self, error: SchedulerContractError) -> Outcome:
        """Fail the active requests and drop the steps in flight, because the scheduler broke a rule."""
        self.finals.answer_refusals()
        while self.active.in_order:    # an end may end others: finals that a static batch holds back
            self.finals.fail(self.active.in_order[0], error.code, str(error))
        self.window.drop_all()
        return Outcome()

    # poll

    def _poll_stops(self) -> None:
        """End the live requests that the poll callback names. Other ids are ignored."""
        stops = self.callbacks.poll_stops()
        if not stops:
            return
        for admitted in self.intake.waiting.withdraw(stops):
            self.finals.end_waiting(admitted, FinishReason.CANCELLED)
        for request in [request for request in self.active if request.request_id in stops]:
            if self.active.get(request.request_id) is request:    # an end may end others
                self.finals.end(request, FinishReason.CANCELLED)

    # report

    def _report(self, record: IterationRecord) -> bool:
        """Report the iteration if it had an active request.

        Unless the engine has failed, also report the iteration if it had a refusal.

        Returns whether the iteration did anything.
        """
        if self.failure is None:
            self.kv.check_totals()
        if self.finals.ended:
            record.finished = self.finals.take_ended()
        if self.intake.arrived:
            record.arrived, record.arrived_at_s = self.intake.take_arrived()
        if record.active_requests or record.had_refusals and self.failure is None:
            if record.kv_cache is None:    # nothing was launched
                record.kv_cache = self.kv.usage()
            self.reporter.report(record)
            self.iteration += 1
            if self._flush_stats_when_idle and record.active_requests and self.is_empty:
                self.window.drop_all()    # no request needs their results
                self.reporter.report(IterationRecord(self.iteration, self.iteration % self.limits.num_micro_batches,
                                                     self.clock.monotonic(), kv_cache=self.kv.usage()))
                self.iteration += 1
            if self._phase_times is not None:
                record.end_reasons = self.finals.take_end_reasons()
                record.finished_at_s = self.finals.take_end_times(record.finished)
                record.started_at, phases_us = self._phase_times.take()
                self.reporter.trace(record, phases_us, len(self.intake))
        if self.kv_events is not None:
            self.callbacks.kv_events(self.kv_events.collect())
        return record.active_requests > 0 or record.had_refusals or bool(self.callbacks.fetched)
