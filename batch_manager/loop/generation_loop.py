"""The engine in one sentence: fetch, schedule, claim, start, finish, advance, respond, poll, report."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import Limits
from ..contained_log import log
from ..errors import (
    BatchManagerError,
    InternalError,
    OutOfResourceError,
    SchedulerContractError,
    type_name,
    where_raised,
)
from ..forked_child import Fork
from ..handover import StepOutput
from ..kv.audit import check_totals
from ..kv.kv_cache_manager import KvCacheManager
from ..names import ErrorCode, FinishReason
from ..requests.llm_request import LlmRequest
from ..scheduling.contract import check_plan, plain_plan
from ..scheduling.interfaces import RequestScheduler, SchedulerOutput
from ..seams import Clock, ModelBackend
from ..stats.trace import IterationTrace
from .active_requests import ActiveRequests
from .advance import Outcome, advance
from .callbacks import GuardedCallbacks
from .finals import Finals
from .held_finals import HeldFinals
from .intake import Intake
from .overlooked import Overlooked
from .reporter import Reporter
from .resources import Resource, Resources
from .responder import Responder
from .static_batch import StaticBatch
from .step_runner import RunningStep, StepRunner


@dataclass(slots=True)
class InFlight:
    """A step that was launched and not read yet, and its requests in batch order."""

    requests: list[LlmRequest]
    step: RunningStep


class GenerationLoop:
    """Runs iterations. One thread calls it; nothing here knows which.

    Up to `window_depth` steps of disjoint requests are in flight: one, or two with overlapped micro-batches. A request
    is in one of them at most, so its next token is never being computed while its last one is being judged.

    What a failure costs is decided by where it is caught: one sequence (StepRunner), the active requests (a scheduler
    that broke its contract), or everything (`fail`, called by whoever runs the loop when `step` raises).

    failure   why the engine failed, None while it runs; afterwards every request is answered with it
    """

    def __init__(self, *, limits: Limits, callbacks: GuardedCallbacks, intake: Intake, scheduler: RequestScheduler,
                 kv_cache_manager: KvCacheManager, backend: ModelBackend, responder: Responder, clock: Clock,
                 heartbeat: Callable[[str, float], None] = lambda activity, now: None,
                 flush_stats_when_idle: bool = False, trace: Callable[[IterationTrace], None] | None = None,
                 window_depth: int = 1, static_batch: StaticBatch | None = None,
                 resources: Sequence[Resource] = ()) -> None:
        self.limits = limits
        self.callbacks = callbacks
        self.unanswered = callbacks.unanswered
        self.intake = intake
        self.scheduler = scheduler
        self.kv = kv_cache_manager
        self.backend = backend
        self.clock = clock
        self.active = ActiveRequests()
        self.failure: BatchManagerError | None = None
        self._responder = responder
        self._resources = Resources(kv_cache_manager, limits.max_seq_len, static_batch, resources)
        finals = Finals if static_batch is None else HeldFinals
        self.finals = finals(self.unanswered, self.active, intake, self._resources, responder, backend)
        self._overlooked = Overlooked(kv_cache_manager, limits)
        self._runner = StepRunner(backend, limits.vocab_size, clock, heartbeat)
        self.reporter = Reporter(self, self._runner, trace, flush_stats_when_idle, window_depth,
                                 static_batch)
        self._fork = Fork()
        self._window: deque[InFlight] = deque()
        self._window_depth = window_depth

    def step(self, *, accept_new: bool) -> bool:
        """One turn of the loop. False when there was nothing to do."""
        if accept_new:
            self.intake.ask(self._room())
        if self.is_empty:    # kept short: an idle worker comes here two hundred times a second
            self.callbacks.poll_stops()
            return False
        self.reporter.begin(self.clock.monotonic())
        self._fetch()
        had_refusals = bool(self.unanswered.refusals)
        had_active = len(self.active) > 0
        outcome = Outcome()
        if had_active:
            try:
                plan = self._schedule()
                launched = self._launch(plan)
                self.reporter.note_launch(plan, None if launched is None else launched.batch)
                if launched is None or len(self._window) == self._window_depth:
                    outcome = self._finish_oldest()
            except SchedulerContractError as error:
                self._answer_all_active(error)
        self._respond(outcome)
        self._poll_stops()
        if self.failure is None:
            check_totals(self.kv)
        self.reporter.end(had_active)
        return had_active or had_refusals or bool(self.callbacks.fetched)

    @property
    def is_empty(self) -> bool:
        """Nobody is owed an answer and nothing that was handed over is unread."""
        return not (self.unanswered or self.callbacks.fetched)

    def answer_the_rest(self, error: BatchManagerError) -> None:
        """One final with this error for everything alive and everything handed over. Afterwards the loop is empty.

        What raises in here leaves the rest for the next call; so it is with `fail`.
        """
        self._window.clear()
        if self.failure is None:
            self._give_everything_back()
        self.callbacks.fetched.stop_growing()
        self.finals.fail_everything(error)
        while not self.is_empty:
            self.intake.fetch(0, self.active.__contains__, error)
            self.finals.answer_refusals()

    def _give_everything_back(self) -> None:
        """The end, of an engine that is whole: nobody holds a block when he is told of it."""
        try:
            for request in self.active:
                self._resources.release(request)
        except BaseException:    # the finals matter more
            log.exception("what requests held could not be given back at the end")

    def fail(self, error: BatchManagerError) -> None:
        """The engine cannot go on: answer everybody now, and everybody who comes until shutdown."""
        if self.failure is None:
            self.failure = error
        self._window.clear()
        self.finals.fail_everything(self.failure)

    # fetch

    def _room(self) -> int | None:
        """Places among the active requests, None: unbounded."""
        limits = self.limits
        return None if limits.unbounded_sequences else max(limits.max_num_sequences - len(self.active), 0)

    def _fetch(self) -> None:
        for admitted in self.intake.fetch(self._room(), self.active.__contains__, self.failure):
            self.active.add(admitted.request)
            self._resources.admit(admitted)
            self._responder.admit(admitted)

    # schedule, claim, start

    def _schedule(self) -> SchedulerOutput:
        active = self.active.in_order()
        inflight = frozenset(request.request_id for flight in self._window for request in flight.requests)
        self.kv.inflight_request_ids = inflight
        try:
            plan = self.scheduler.schedule_request(active, inflight)
        except SchedulerContractError:
            raise
        except BaseException as error:  # noqa: B036  whatever it raises, it costs the active requests and no more
            raise self._blamed("schedule_request raised", error) from error
        try:
            plan = plain_plan(plan, len(active))
            check_plan(self.scheduler, plan, active, inflight, self.kv, self.limits)
        except (SchedulerContractError, InternalError):
            raise
        except BaseException as error:  # noqa: B036
            raise self._blamed("its plan cannot be read: that raised", error) from error
        self._overlooked.look(self.scheduler, plan, active, inflight)
        if not (plan.context_requests or plan.generation_requests or self._window):
            raise SchedulerContractError(
                self.scheduler, f"{len(active)} requests are active, none is scheduled and nothing is in flight")
        return plan

    def _blamed(self, what: str, error: BaseException) -> SchedulerContractError:
        self._fork.end_the_child(error)
        log.error("the scheduler: %s %s\n%s", what, type_name(error), where_raised(error))
        return SchedulerContractError(self.scheduler, f"{what} {type_name(error)}")

    def _launch(self, plan: SchedulerOutput) -> RunningStep | None:
        self.reporter.recomputed_tokens += self._resources.pause(plan.paused_requests)
        if not (plan.context_requests or plan.generation_requests):
            return None
        try:
            batch = self._resources.claim(plan, self.reporter.iteration, self.reporter.micro_batch_id)
        except OutOfResourceError as error:
            raise SchedulerContractError(self.scheduler, f"more than there is: {error}") from error
        self._runner.copy_blocks(self._resources.take_copies())
        step = self._runner.start(batch)
        self._window.append(InFlight([*plan.context_requests, *plan.generation_requests], step))
        return step

    # finish, advance

    def _finish_oldest(self) -> Outcome:
        flight = self._window.popleft()
        batch, output = flight.step.batch, self._output_of(flight)
        outcome = advance(batch, output, flight.requests, self._responder, self._resources)
        if batch.context:
            self._resources.publish(flight.requests[:len(batch.context)])
        return outcome

    def _output_of(self, flight: InFlight) -> StepOutput:
        batch = flight.step.batch
        return flight.step.finish([other.step.batch for other in self._window
                                   if other.step.batch.iteration > batch.iteration])

    # respond

    def _respond(self, outcome: Outcome) -> None:
        self.finals.answer_refusals()
        for request, failure in outcome.failed:
            self.finals.fail(request, failure.code, failure.message, clear_blocks=True)
        for request, reason in outcome.ended:
            self.finals.end(request, reason)
        for request in outcome.to_send:
            self._responder.send_new_tokens(request)
        self.reporter.generated_tokens += outcome.generated_tokens
        self._expire()
        self.finals.send_held()

    def _expire(self) -> None:
        """End what has passed its deadline: with its tokens where it has some, with an error where it has none."""
        expired = self.intake.expired()
        for admitted in self.intake.withdraw(expired.keys()):
            self.finals.fail_waiting(admitted, ErrorCode.DEADLINE, expired[admitted.request.request_id])
        for request in [self.active.get(request_id) for request_id in sorted(expired) if request_id in self.active]:
            failed = self._failed_in_flight(request)
            if request.total_generated_tokens:
                self.finals.end(request, FinishReason.TIMED_OUT, clear_blocks=failed)
            else:
                self.finals.fail(request, ErrorCode.DEADLINE, expired[request.request_id], clear_blocks=failed)

    def _answer_all_active(self, error: SchedulerContractError) -> None:
        """A scheduler that broke a rule has no plan to go on with. Steps in flight are read and dropped."""
        self.finals.answer_refusals()
        failed_slots: set[int] = set()
        while self._window:
            failed_slots.update(self._output_of(self._window.popleft()).failures)
        for request in self.active.in_order():
            self.finals.fail(request, error.code, str(error), clear_blocks=request.seq_slot in failed_slots)

    # poll

    def _poll_stops(self) -> None:
        """End what was asked to stop and is alive at this moment; other ids are not remembered."""
        stops = self.callbacks.poll_stops()
        if not stops:
            return
        for admitted in self.intake.withdraw(stops):
            self.finals.end_waiting(admitted, FinishReason.CANCELLED)
        for request in [request for request in self.active if request.request_id in stops]:
            self.finals.end(request, FinishReason.CANCELLED, clear_blocks=self._failed_in_flight(request))
        self.finals.send_held()

    def _failed_in_flight(self, request: LlmRequest) -> bool:
        """Whether the step in flight that a request is in left something in its blocks; waits for that step.

        To be asked before a request ends early. Its blocks go to others then, and a step that failed is run again in
        parts: it must not write to them any more.
        """
        return any(request.seq_slot in self._output_of(flight).failures
                   for flight in self._window if request in flight.requests)
