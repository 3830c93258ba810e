"""Measures the phases of an iteration, for traces."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..seams import Clock

# Timed methods of the loop -> names of the phases in a trace.
PHASES = {"_fetch": "fetch", "_schedule": "schedule", "_claim": "claim", "_start": "start", "_finish": "read",
          "_advance": "advance", "_respond": "respond", "_poll_stops": "poll"}


class PhaseTimes:
    """Measures the phases of a loop's iterations. The loop creates it only if there is a trace hook."""

    def __init__(self, loop: object, clock: Clock) -> None:
        """Wrap the phase methods of `loop`, which is mutated."""
        self._now = clock.monotonic
        self._microseconds: dict[str, int] = {}
        for method, phase in PHASES.items():
            setattr(loop, method, self._timed(getattr(loop, method), phase))

    def take(self) -> dict[str, int]:
        """Return phase -> microseconds, for the phases that ended since the last call of this method."""
        taken, self._microseconds = self._microseconds, {}
        return taken

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        now = self._now

        @wraps(method)
        def timed(*arguments: Any) -> Any:
            started_at = now()
            try:
                return method(*arguments)
            finally:
                self._microseconds[phase] = max(round(1e6 * (now() - started_at)), 0)    # a clock may be set back

        return timed
