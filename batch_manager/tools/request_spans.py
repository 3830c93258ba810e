"""The history of each request of a trace, as consecutive spans of time without gaps."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..scheduling.waiting import IN_FLIGHT
from ..stats.trace import IterationTrace
from .client_waits import REFUSALS, ClientWaits

CONTEXT, GENERATION, PAUSED, QUEUED, WAITING = "context", "generation", "paused", "queued", "waiting"
CLIENT = "client"
GENERATES = (GENERATION, "")
CALLBACK_PHASES = ("trace", "get", "respond", "poll", "after_responses", "stats")     # phases that call user code
NO_STEP = "no step"          # why a request was WAITING: the iteration planned no step. Not recorded, but seen


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a request, and what ran beside it.

    iteration      number of its iteration
    seconds        time of the request in the iteration
    others         number of other requests in the step
    other_tokens   prompt tokens of other requests in the step
    prompts        ids of these requests
    """

    iteration: int
    seconds: float
    others: int
    other_tokens: int
    prompts: tuple[int, ...]


@dataclass(slots=True)
class Span:
    """Successive iterations in which a request was in the same state.

    kind        CONTEXT, GENERATION, PAUSED, CLIENT (arrived, but not accepted), QUEUED (accepted, but not active) or
                WAITING (active, but in no step)
    reason      why the request was WAITING: one of REASONS in batch_manager/scheduling/waiting.py, or NO_STEP; why it
                was in the CLIENT: a reason of client_waits.py. For other kinds: ""
    begin_s     start of the span: for the first span, the arrival of the request; for the first span after CLIENT, the
                end of the get callback; otherwise the start of the span's first iteration
    end_s       start of the request's next span; for the last span: when the final response was sent, or the end of the
                last iteration if the trace does not record that. Times are in seconds of the engine's clock
    iterations  number of iterations; 0 for CLIENT
    named       how many of these iterations name the request; for QUEUED: all. In the others, its step is in flight
    tokens      number of context tokens computed in the span
    first       position of the first of these tokens
    again       how many of these tokens had been computed before
    found       number of context tokens that were in the cache when the context began, or began again after a pause
    pauses      number of recorded pauses of the request up to the span
    running     ids of the requests that ran in the steps during a QUEUED or WAITING span; empty for other kinds
    steps, others      CONTEXT and GENERATION: number of steps of the request in the span, and the sum over these steps
                       of the number of other requests in the step
    with_prompts, with_prompts_s   number and duration of the steps that also computed prompts of other requests
    other_tokens, prompts          tokens and requests of these prompts
    slowest     the longest of the steps; None: the span has no step
    callbacks_s   phase, one of CALLBACK_PHASES -> seconds of the span in this phase; empty for CLIENT
    """

    kind: str
    reason: str
    begin_s: float
    end_s: float
    iterations: int = 0
    named: int = 0
    tokens: int = 0
    first: int = 0
    again: int = 0
    found: int = 0
    pauses: int = 0
    running: set[int] = field(default_factory=set)
    steps: int = 0
    others: int = 0
    with_prompts: int = 0
    with_prompts_s: float = 0.0
    other_tokens: int = 0
    prompts: set[int] = field(default_factory=set)
    slowest: Step | None = None
    callbacks_s: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(slots=True)
class Life:
    """The history of one request.

    first_iteration  number of the iteration that accepted or refused the request. If the trace does not have this
                     iteration: number of the first iteration that names the request
    arrived_before   number of the first recorded iteration that began after the arrival, at most first_iteration; None:
                     no iteration up to first_iteration did, or the trace does not record when the request arrived
    last_iteration   number of the iteration that ended the request, or of the last iteration of the trace
    spans            consecutive spans without gaps; empty for a refused request
    has_arrived      whether the trace contains the arrival of the request
    has_ended        whether the trace contains the end of the request, or its refusal
    end_reason       name of a FinishReason or an ErrorCode; "": the trace does not record it
    pauses           number of recorded pauses
    settings         name -> value of the engine's settings, if the trace records them
    """

    request_id: int
    first_iteration: int
    last_iteration: int
    spans: list[Span] = field(default_factory=list)
    arrived_before: int | None = None
    has_arrived: bool = False
    has_ended: bool = False
    end_reason: str = ""
    pauses: int = 0
    settings: Mapping[str, int | str] = field(default_factory=dict)
    _position: int | None = None         # end of the latest chunk; 0 after a pause; None: unknown
    _computed: int = 0                   # number of leading tokens that chunks and the steps before them computed
    _num_generated: int = 0              # number of generation steps since the latest chunk

    @property
    def was_refused(self) -> bool:
        return not self.spans

    @property
    def seconds(self) -> float:
        return self.spans[-1].end_s - self.spans[0].begin_s if self.spans else 0.0


def lives(iterations: Iterable[IterationTrace]) -> Iterator[Life]:
    """Yield the history of each request: first the requests that end, in the order of their ends, then the others.

    Several requests may have the same id one after the other. An iteration in which a request only waits for its step
    in flight is added to the request's current span. An iteration lasts until the next iteration begins. The last
    iteration, and an iteration that leaves the engine idle, last until their phases have ended.
    """
    histories = _Histories()
    last: IterationTrace | None = None
    for iteration in iterations:
        if last is not None:
            yield from histories.note(last, iteration.started_at_s)
        last = iteration
    if last is not None:
        yield from histories.note(last, math.inf)
        for life in histories.alive.values():
            life.last_iteration = last.iteration
            _add(life.spans[-1].callbacks_s, histories.callbacks_s)
    yield from histories.alive.values()


def has_no_step(iteration: IterationTrace) -> bool:
    """Whether the iteration planned no step, so that accepted requests without a step are active and not queued."""
    return not (iteration.queued_requests or iteration.context or iteration.generation or iteration.paused
                or iteration.waiting)


def end_of(iteration: IterationTrace, next_s: float, *, is_idle: bool) -> float:
    """Return when an iteration ends, in seconds of the engine's clock.

    next_s    start of the next iteration; infinite for the last one
    is_idle   whether no request is alive after the iteration
    """
    if next_s < math.inf and not is_idle:
        return next_s
    return min(next_s, iteration.started_at_s + 1e-6 * sum(iteration.phases_us.values()))


class _Histories:
    """The histories of the requests that are alive at one point of a trace.

    alive         request id -> history
    callbacks_s   phase, one of CALLBACK_PHASES -> seconds of all iterations so far
    """

    def __init__(self) -> None:
        self.alive: dict[int, Life] = {}
        self.callbacks_s = dict.fromkeys(CALLBACK_PHASES, 0.0)
        self._client = ClientWaits()
        self._numbers: list[int] = []
        self._began_at_s: list[float] = []
        self._settings: Mapping[str, int | str] = {}

    def note(self, iteration: IterationTrace, next_s: float) -> Iterator[Life]:
        """Add an iteration to the histories. Yields the histories of the requests that it ends or refuses.

        next_s   start of the next iteration; infinite for the last one
        """
        alive, number, begin_s = self.alive, iteration.iteration, iteration.started_at_s
        self._settings = iteration.settings or self._settings
        self._numbers.append(number)
        self._began_at_s.append(begin_s)
        got_at_s = self._client.begin(iteration)
        chunks = {request_id: (first, tokens) for request_id, first, tokens in iteration.context}
        did = _activities(iteration)
        for request_id in did:
            if request_id not in alive:
                alive[request_id] = Life(request_id, number, number, settings=self._settings)
        for request_id in iteration.arrived:
            alive[request_id].has_arrived, alive[request_id]._position = True, 0
        begins = {}
        for request_id, arrived_at_s in zip(iteration.arrived, iteration.arrived_at_s):
            waits = self._client.waits(arrived_at_s, got_at_s)
            alive[request_id].spans += [Span(CLIENT, wait.reason, wait.begin_s, wait.end_s) for wait in waits]
            begins[request_id] = got_at_s if waits else arrived_at_s
            if (index := bisect_left(self._began_at_s, arrived_at_s)) < len(self._numbers):
                alive[request_id].arrived_before = self._numbers[index]
        is_idle = alive.keys() <= {*iteration.finished}
        end_s = end_of(iteration, next_s, is_idle=is_idle)
        ends = dict(zip(iteration.finished, iteration.finished_at_s))
        running = chunks.keys() | {*iteration.generation}
        all_tokens = sum(tokens for _, tokens in chunks.values())
        is_without_step = has_no_step(iteration)
        seconds, others = end_s - begin_s, len(running) - 1
        generating = Step(number, seconds, others, all_tokens, tuple(sorted(chunks)))
        for request_id, life in alive.items():
            last = life.spans[-1] if life.spans else None
            # Written inline: most requests of most iterations go on generating.
            if last is not None and last.kind is GENERATION and did.get(request_id) is GENERATES and (
                    request_id not in ends):
                last.end_s = end_s
                last.iterations += 1
                last.named += 1
                last.steps += 1
                last.others += others
                if all_tokens:
                    _note_prompts(last, generating)
                if last.slowest is None or seconds > last.slowest.seconds:
                    last.slowest = generating
                life._num_generated += 1
                continue
            kind, reason = did.get(request_id) or (
                (QUEUED, "") if last is None or last.kind == CLIENT else (last.kind, last.reason))
            if kind == QUEUED and is_without_step:
                kind, reason = WAITING, NO_STEP
            first, tokens = chunks.get(request_id, (0, 0))
            if kind == PAUSED and request_id in did:
                life.pauses += 1
                life._position = 0
            if last is None or (kind, reason) != (last.kind, last.reason) or (
                    tokens and first < last.first + last.tokens):
                begin = begins.get(request_id, begin_s)
                if last is not None and last.kind != CLIENT:
                    _add(last.callbacks_s, self.callbacks_s)
                last = Span(kind, reason, begin, begin, first=first, pauses=life.pauses)
                _add(last.callbacks_s, self.callbacks_s, -1)        # the sum at its end is added when it ends
                _add(last.callbacks_s, _in_callbacks(iteration, begin), -1)
                life.spans.append(last)
            before_s = max(last.end_s, begin_s)
            last.end_s = max(ends.get(request_id, end_s), last.begin_s)
            last.iterations += 1
            last.named += kind == QUEUED or request_id in did
            if kind in (QUEUED, WAITING):
                last.running |= running
            elif request_id in running:
                _note_step(last, Step(number, last.end_s - before_s, len(running) - 1, all_tokens - tokens,
                                      tuple(sorted(other for other in chunks if other != request_id))))
                if tokens:
                    _note_tokens(life, last, first, tokens)
                else:
                    life._num_generated += 1
        self._client.end(iteration, got_at_s, end_s if is_idle else None)
        callbacks_s = self.callbacks_s
        self.callbacks_s = dict(callbacks_s)
        _add(self.callbacks_s, _in_callbacks(iteration, math.inf))
        for life in _ended(iteration, alive):
            if life.spans:
                _add(life.spans[-1].callbacks_s, callbacks_s)
                _add(life.spans[-1].callbacks_s, _in_callbacks(iteration, life.spans[-1].end_s))
            yield life


def _in_callbacks(iteration: IterationTrace, until_s: float) -> dict[str, float]:
    """Return phase, one of CALLBACK_PHASES -> seconds of the iteration in it, up to a time of the engine's clock."""
    found, at_s = {}, iteration.started_at_s
    for phase, duration_us in iteration.phases_us.items():
        if phase in CALLBACK_PHASES:
            found[phase] = min(max(until_s - at_s, 0.0), 1e-6 * duration_us)
        at_s += 1e-6 * duration_us
    return found


def _add(sums: dict[str, float], seconds: Mapping[str, float], sign: int = 1) -> None:
    for phase, value in seconds.items():
        sums[phase] = sums.get(phase, 0.0) + sign * value


def _activities(iteration: IterationTrace) -> dict[int, tuple[str, str]]:
    """Return request id -> (kind, reason) of the requests that the iteration names as alive."""
    did = dict.fromkeys(iteration.arrived, (QUEUED, ""))
    for reason, ids in iteration.waiting.items():
        if reason != IN_FLIGHT:
            did |= dict.fromkeys(ids, (WAITING, reason))
    did |= dict.fromkeys([request_id for request_id, _, _ in iteration.context], (CONTEXT, ""))
    return did | dict.fromkeys(iteration.generation, GENERATES) | dict.fromkeys(iteration.paused, (PAUSED, ""))


def _note_step(span: Span, step: Step) -> None:
    span.steps += 1
    span.others += step.others
    if step.other_tokens:
        _note_prompts(span, step)
    if span.slowest is None or step.seconds > span.slowest.seconds:
        span.slowest = step


def _note_prompts(span: Span, step: Step) -> None:
    span.with_prompts += 1
    span.with_prompts_s += step.seconds
    span.other_tokens += step.other_tokens
    span.prompts.update(step.prompts)


def _note_tokens(life: Life, span: Span, first: int, tokens: int) -> None:
    """Note that a step computes `tokens` context tokens from position `first`."""
    span.tokens += tokens
    if life._position is not None:
        span.found += max(first - life._position, 0)
    span.again += max(min(first + tokens, life._computed + life._num_generated) - first, 0)
    life._position = first + tokens
    life._computed = max(life._computed + life._num_generated, first + tokens)
    life._num_generated = 0


def _ended(iteration: IterationTrace, alive: dict[int, Life]) -> Iterator[Life]:
    """Yield the histories of the requests that an iteration ended or refused. Removes ended requests from `alive`."""
    reasons: dict[int, list[str]] = {}
    for reason, ids in iteration.end_reasons.items():
        for request_id in ids:
            reasons.setdefault(request_id, []).append(reason)
    ended = dict.fromkeys(iteration.finished) | dict.fromkeys(
        [request_id for request_id, names in reasons.items() if not {*names} <= {*REFUSALS}])
    for request_id in ended:
        if request_id in alive:
            life = alive.pop(request_id)
            life.last_iteration, life.has_ended = iteration.iteration, True
            if names := reasons.get(request_id):
                # A duplicate of the request may be refused in the same iteration.
                life.end_reason = min(names, key=lambda name: name in REFUSALS)
                names.remove(life.end_reason)
            yield life
    for request_id, names in reasons.items():
        for name in names:
            yield Life(request_id, iteration.iteration, iteration.iteration, [], has_ended=True, end_reason=name)
