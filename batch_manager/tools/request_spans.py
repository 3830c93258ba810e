"""The history of each request of a trace, as consecutive spans of time without gaps."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..names import ErrorCode
from ..scheduling.waiting import IN_FLIGHT
from ..stats.trace import IterationTrace

REFUSALS = (ErrorCode.INVALID_REQUEST.name, ErrorCode.DUPLICATE_REQUEST_ID.name,
            ErrorCode.TOO_LARGE_FOR_KV_CACHE.name, ErrorCode.QUEUE_FULL.name)
CONTEXT, GENERATION, PAUSED, QUEUED, WAITING = "context", "generation", "paused", "queued", "waiting"
CLIENT = "client"


@dataclass(slots=True)
class Span:
    """Successive iterations in which a request was in the same state.

    kind        CONTEXT, GENERATION, PAUSED, CLIENT (arrived, but not accepted), QUEUED (accepted, but not active) or
                WAITING (active, but in no step)
    reason      why the request was WAITING: one of REASONS in batch_manager/scheduling/waiting.py. For other
                kinds: ""
    begin_s     start of the span's first iteration; for CLIENT: arrival of the request
    end_s       start of the request's next span; for the last span: end of its last iteration. Both times are in
                seconds of the engine's clock
    iterations  number of iterations; 0 for CLIENT
    tokens      number of context tokens computed in the span
    first       position of the first of these tokens
    running     ids of the requests that ran in the steps during a QUEUED or WAITING span; empty for other kinds
    """

    kind: str
    reason: str
    begin_s: float
    end_s: float
    iterations: int = 1
    tokens: int = 0
    first: int = 0
    running: set[int] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(slots=True)
class Life:
    """The history of one request.

    first_iteration  number of the iteration that accepted or refused the request. If the trace does not have this
                     iteration: number of the first iteration that names the request
    last_iteration   number of the iteration that ended the request, or of the last iteration of the trace
    spans            consecutive spans without gaps; empty for a refused request
    has_ended        whether the trace contains the end of the request, or its refusal
    end_reason       name of a FinishReason or an ErrorCode; "": the trace does not record it
    """

    request_id: int
    first_iteration: int
    last_iteration: int
    spans: list[Span] = field(default_factory=list)
    has_ended: bool = False
    end_reason: str = ""

    @property
    def was_refused(self) -> bool:
        return not self.spans

    @property
    def seconds(self) -> float:
        return self.spans[-1].end_s - self.spans[0].begin_s if self.spans else 0.0


def lives(iterations: Iterable[IterationTrace]) -> Iterator[Life]:
    """Yield the history of each request: first the requests that end, in the order of their ends, then the others.

    Several requests may have the same id one after the other. An iteration in which a request only
    waits for its step in flight is added to the request's current span. An iteration lasts until the next iteration
    begins. The last iteration, and an iteration that leaves the engine idle, last until their phases have ended.
    """
    alive: dict[int, Life] = {}
    last: IterationTrace | None = None
    for iteration in iterations:
        if last is not None:
            yield from _note(last, iteration.started_at_s, alive)
        last = iteration
    if last is not None:
        yield from _note(last, math.inf, alive)
    yield from alive.values()


def _note(iteration: IterationTrace, end_s: float, alive: dict[int, Life]) -> Iterator[Life]:
    """Add an iteration to the histories of the open requests.

    Yields the histories of the requests that the iteration ends or refuses.

    end_s   start of the next iteration; infinite for the last iteration
    alive   request id -> history, of the open requests; updated in place
    """
    number, begin_s = iteration.iteration, iteration.started_at_s
    did: dict[int, tuple[str, str, int, int]] = {i: (QUEUED, "", 0, 0) for i in iteration.arrived}
    for reason, ids in iteration.waiting.items():
        if reason != IN_FLIGHT:
            did |= dict.fromkeys(ids, (WAITING, reason, 0, 0))
    did |= {request_id: (CONTEXT, "", start, tokens) for request_id, start, tokens in iteration.context}
    did |= dict.fromkeys(iteration.generation, (GENERATION, "", 0, 0)) | dict.fromkeys(iteration.paused,
                                                                                      (PAUSED, "", 0, 0))
    running = {request_id for request_id, _, _ in iteration.context} | {*iteration.generation}
    for request_id in did:
        if request_id not in alive:
            alive[request_id] = Life(request_id, number, number)
    for request_id, arrived_at_s in zip(iteration.arrived, iteration.arrived_at_s):
        if arrived_at_s < begin_s:
            alive[request_id].spans.append(Span(CLIENT, "", arrived_at_s, begin_s, 0))
    if end_s == math.inf or alive.keys() <= {*iteration.finished}:     # the engine is idle until the next request
        end_s = min(end_s, begin_s + 1e-6 * sum(iteration.phases_us.values()))
    for request_id, life in alive.items():
        life.last_iteration = number
        last = life.spans[-1] if life.spans else None
        kind, reason, first, tokens = did.get(request_id) or (
            (QUEUED, "", 0, 0) if last is None or last.kind == CLIENT
            else (last.kind, last.reason, last.first + last.tokens, 0))
        if last is None or (kind, reason) != (last.kind, last.reason) or (
                kind == CONTEXT and tokens and first < last.first + last.tokens):
            last = Span(kind, reason, begin_s, end_s, 0, 0, first)
            life.spans.append(last)
        last.end_s = end_s
        last.iterations += 1
        last.tokens += tokens
        if kind in (QUEUED, WAITING):
            last.running |= running
    yield from _ended(iteration, alive)


def _ended(iteration: IterationTrace, alive: dict[int, Life]) -> Iterator[Life]:
    """Yield the histories of the requests that an iteration ended or refused. Removes ended requests from `alive`."""
    reasons: dict[int, list[str]] = {}
    for reason, ids in iteration.end_reasons.items():
        for request_id in ids:
            reasons.setdefault(request_id, []).append(reason)
    for request_id in iteration.finished:
        if request_id in alive:
            life = alive.pop(request_id)
            life.has_ended = True
            if names := reasons.get(request_id):
                # A duplicate of the request may be refused in the same iteration.
                life.end_reason = min(names, key=lambda name: name in REFUSALS)
                names.remove(life.end_reason)
            yield life
    for request_id, names in reasons.items():
        for name in names:
            yield Life(request_id, iteration.iteration, iteration.iteration, [], True, name)
