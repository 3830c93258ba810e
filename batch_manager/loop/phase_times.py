"""Measures the phases of an iteration, for traces."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..seams import Clock

# Timed methods of the loop -> names of the phases in a trace.
PHASES = {"_fetch": "fetch", "_schedule": "schedule", "_claim": "claim", "_start": "start", "_finish": "read",
          "_advance": "advance", "_respond": "respond", "_poll_stops": "poll"}
TRACE, GET, AFTER_RESPONSES, REPORT, STATS = "trace", "get", "after_responses", "report", "stats"


class PhaseTimes:
    """Measures the phases of a loop's iterations. The loop creates it only if there is a trace hook.

    The phases add up to the iteration: a phase lasts from the end of the phase before it to its own end, and an
    iteration begins where the previous one ended, unless the engine was idle. The call of the trace hook therefore
    counts for the next iteration.
    """

    def __init__(self, loop: Any, clock: Clock) -> None:
        """Wrap the methods of `loop` that run the phases. `loop` is mutated."""
        self._now = clock.monotonic
        self._loop = loop
        self._goes_on = False
        self._began = self._now()
        self._lasted_us = 0
        self._microseconds: dict[str, int] = {}
        loop.step = self._step(loop.step)
        loop.intake.ask = self._timed(loop.intake.ask, GET)
        for method, phase in PHASES.items():
            setattr(loop, method, self._timed(getattr(loop, method), phase))
        if loop.callbacks.has_after_responses:
            loop.callbacks.after_responses = self._timed(loop.callbacks.after_responses, AFTER_RESPONSES)
        if loop.callbacks.wants_stats:
            loop.callbacks.return_stats = self._timed(loop.callbacks.return_stats, STATS, before=REPORT)

    def take(self) -> tuple[float, dict[str, int]]:
        """End the iteration. Returns (its start in seconds of the clock, phase -> microseconds)."""
        self._end_phase(REPORT)
        began, taken = self._began, self._microseconds
        self._begin()
        return began, taken

    def _begin(self) -> None:
        self._began, self._lasted_us, self._microseconds = self._now(), 0, {}

    def _end_phase(self, phase: str) -> None:
        lasted_us = max(round(1e6 * (self._now() - self._began)), self._lasted_us)    # a clock may be set back
        self._microseconds[phase] = self._microseconds.get(phase, 0) + lasted_us - self._lasted_us
        self._lasted_us = lasted_us

    def _step(self, method: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(method)
        def step(*, accept_new: bool) -> bool:
            if self._goes_on:
                self._end_phase(TRACE)
            else:
                self._begin()
            self._goes_on = False
            did_anything = method(accept_new=accept_new)
            self._goes_on = did_anything and not self._loop.is_empty
            return did_anything

        return step

    def _timed(self, method: Callable[..., Any], phase: str, before: str | None = None) -> Callable[..., Any]:
        """
        before   the phase that a call of the method ends; None: the phase of the method itself
        """
        @wraps(method)
        def timed(*arguments: Any) -> Any:
            if before is not None:
                self._end_phase(before)
            try:
                return method(*arguments)
            finally:
                self._end_phase(phase)

        return timed
