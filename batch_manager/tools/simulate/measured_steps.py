"""Measured step times of a trace."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from ...stats.trace import IterationTrace
from .step_shape import StepShape, shapes_of_trace

US = 1e-6
AFTER_READ = ("advance", "respond", "poll", "after_responses", "report", "stats")
# A trace is asynchronous if more than this share of the requests end after the iteration of their last step.
SHARE_READ_LATER = 0.5
LEAST_WAIT = 0.02           # share of the time between two reads; after a shorter wait the device may have been idle


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured times of one step.

    step_s   seconds of the device, or of the CPU that computes the step; None: unknown
    host_s   seconds of the host's part of the iteration; None: unknown
    """

    shape: StepShape
    step_s: float | None
    host_s: float | None


def measured_steps(iterations: Iterable[IterationTrace]) -> tuple[list[MeasuredStep], bool]:
    """Return the steps of a trace, and whether the host plans each step while the device computes the previous step."""
    rows = [(iteration, shape) for iteration, shape in shapes_of_trace(iterations)]
    is_asynchronous = _reads_later([iteration for iteration, _ in rows])
    found = (_asynchronous if is_asynchronous else _in_lockstep)(rows)
    return list(found), is_asynchronous


def _reads_later(iterations: list[IterationTrace]) -> bool:
    ended = later = 0
    started: set[int] = set()
    for iteration in iterations:
        launched = {request_id for request_id, _, _ in iteration.context} | set(iteration.generation)
        started |= launched
        ran = started.intersection(iteration.finished)
        ended += len(ran)
        later += len(ran - launched)
        started -= ran
    return later > SHARE_READ_LATER * ended


def _in_lockstep(rows: list[tuple[IterationTrace, StepShape]]) -> Iterator[MeasuredStep]:
    for number, (iteration, shape) in enumerate(rows):
        if not _has_step(shape):
            continue
        step_s = US * (iteration.phases_us.get("start", 0) + iteration.phases_us.get("read", 0))
        host_s = None
        if number + 1 < len(rows) and _goes_on(iteration, rows[number + 1][0]):
            host_s = max(rows[number + 1][0].started_at_s - iteration.started_at_s - step_s, 0.0)
        yield MeasuredStep(shape, step_s or None, host_s)


def _asynchronous(rows: list[tuple[IterationTrace, StepShape]]) -> Iterator[MeasuredStep]:
    """Yield the measured steps of iterations that each launch a step and read the step of the previous iteration.

    If the host waits for a step, the time of the step runs from the end of the previous read to the end of the read of
    this step. Otherwise the time is unknown, because the device may have been idle.
    """
    for number, (iteration, shape) in enumerate(rows):
        if not _has_step(shape):
            continue
        step_s = host_s = None
        if number + 1 < len(rows) and _goes_on(iteration, rows[number + 1][0]):
            following = rows[number + 1][0]
            between = _read_at(following) - _read_at(iteration)
            waited = US * following.phases_us.get("read", 0)
            if _has_step(rows[number - 1][1]) and number and waited > LEAST_WAIT * between > 0:
                step_s = between
            host_s = max(following.started_at_s - iteration.started_at_s - US * iteration.phases_us.get("read", 0), 0.0)
        yield MeasuredStep(shape, step_s, host_s)


def _has_step(shape: StepShape) -> bool:
    return bool(shape.context_requests or shape.generation_requests)


def _goes_on(iteration: IterationTrace, following: IterationTrace) -> bool:
    """Whether the iterations are consecutive and share a running request: the engine is not idle between them."""
    ran = {request_id for request_id, _, _ in iteration.context} | set(iteration.generation)
    runs = {request_id for request_id, _, _ in following.context} | set(following.generation)
    return following.iteration == iteration.iteration + 1 and not ran.isdisjoint(runs)


def _read_at(iteration: IterationTrace) -> float:
    """Return the time at which the phase `read` of an iteration ends, in seconds of the engine's clock."""
    until_read = takewhile(lambda phase: phase not in AFTER_READ, iteration.phases_us)
    return iteration.started_at_s + US * sum(iteration.phases_us[phase] for phase in until_read)
