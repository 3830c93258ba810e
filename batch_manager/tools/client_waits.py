"""Why requests that had arrived were still in the client, from the iterations of a trace."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from ..names import ErrorCode
from ..scheduling.waiting import IN_FLIGHT
from ..stats.trace import IterationTrace

REFUSALS = (ErrorCode.INVALID_REQUEST.name, ErrorCode.DUPLICATE_REQUEST_ID.name,
            ErrorCode.TOO_LARGE_FOR_KV_CACHE.name, ErrorCode.QUEUE_FULL.name)

UNKNOWN = ""                             # the trace does not record the room of its iterations
BEFORE = "before the first iteration"
IDLE = "engine idle"                     # and get had not returned the request
NEXT_GET = "next get"                    # it arrived after one call of get, and get was not called again yet
FREE_ROOM = "free room"                  # get returned fewer requests than it was asked for, or raised
ADMISSIONS = "max_admissions_per_iteration"      # the iteration read as many items as it may
NO_ROOM = "no room"                      # get was asked for no further request, and all active requests ran
NO_ROOM_AND = f"{NO_ROOM}: "             # the same, and active requests waited; followed by their first reason

LEAST_WAIT_S = 1.5e-6                    # times of a trace are rounded to microseconds
MOST_PARTS, FIRST_PARTS = 64, 8          # many requests may wait while the reason changes with each iteration


class Wait(NamedTuple):
    """A part of a wait in the client, in seconds of the engine's clock."""

    reason: str
    begin_s: float
    end_s: float


class ClientWaits:
    """Follows a trace, and explains the waits in the client that end in its current iteration."""

    def __init__(self) -> None:
        self._get_begins: list[float] = []
        self._get_ends: list[float] = []
        self._begins = [float("-inf")]           # a run lasts until the next one begins
        self._reasons = [BEFORE]
        # reason -> (its runs that have ended, and seconds of all of them up to the end of each)
        self._ended: dict[str, tuple[list[int], list[float]]] = {}
        self._is_idle = True
        self._most_admissions: int | str | None = None

    def begin(self, iteration: IterationTrace) -> float:
        """Begin an iteration. Returns when its get callback ended, in seconds of the engine's clock."""
        self._most_admissions = iteration.settings.get(ADMISSIONS, self._most_admissions)
        if self._is_idle:
            self._run(iteration.started_at_s, UNKNOWN if iteration.room is None else NEXT_GET)
        self._is_idle = False
        phases = iteration.phases_us
        get_begins_at_s = iteration.started_at_s + 1e-6 * phases.get("trace", 0)
        self._get_begins.append(get_begins_at_s)
        return get_begins_at_s + 1e-6 * phases.get("get", 0)

    def waits(self, arrived_at_s: float, got_at_s: float) -> list[Wait]:
        """Return the parts of the wait of a request that arrived at one time, and that get returned at the other.

        Call the method between `begin` and `end` of the iteration that accepted the request. The parts are in order
        and without gaps; there are none if the request did not wait. A wait of more than MOST_PARTS parts has one part
        for each reason after its FIRST_PARTS: their lengths are right, and their places in the wait are not.
        """
        if got_at_s - arrived_at_s <= LEAST_WAIT_S:
            return []
        next_get = bisect_left(self._get_begins, arrived_at_s)
        heard_at_s = self._get_ends[next_get] if next_get < len(self._get_ends) else got_at_s
        found: list[Wait] = []
        first, last = bisect_right(self._begins, arrived_at_s) - 1, len(self._begins) - 1
        is_long = last - first > MOST_PARTS
        for index in (*range(first, first + FIRST_PARTS), last) if is_long else range(first, last + 1):
            if is_long and index == last:
                found += self._by_reason(first + FIRST_PARTS, last)
            begin_s = max(self._begins[index], arrived_at_s)
            end_s = min(self._begins[index + 1] if index + 1 < len(self._begins) else got_at_s, got_at_s)
            reason = self._reasons[index]
            if reason in (UNKNOWN, BEFORE, IDLE):
                parts = [(reason, begin_s, end_s)]
            else:
                heard = min(max(heard_at_s, begin_s), end_s)
                parts = [(NEXT_GET, begin_s, heard), (reason, heard, end_s)]
            for name, begin, end in parts:
                if end <= begin:
                    continue
                if found and found[-1].reason == name:
                    found[-1] = Wait(name, found[-1].begin_s, end)
                else:
                    found.append(Wait(name, begin, end))
        return found

    def _by_reason(self, first: int, last: int) -> Iterator[Wait]:
        """Yield one part for each reason, with the time of its runs from `first` on and before `last`."""
        at_s = self._begins[first]
        for reason, (runs, seconds) in self._ended.items():
            before, until = bisect_left(runs, first), bisect_left(runs, last)
            lasted_s = (seconds[until - 1] if until else 0.0) - (seconds[before - 1] if before else 0.0)
            if until > before:
                yield Wait(reason, at_s, at_s := at_s + lasted_s)

    def end(self, iteration: IterationTrace, got_at_s: float, idle_from_s: float | None) -> None:
        """End an iteration.

        idle_from_s   when the engine became idle, in seconds of its clock; None: requests are alive
        """
        self._get_ends.append(got_at_s)
        self._run(got_at_s, self._reason_to_leave(iteration))
        if idle_from_s is not None:
            self._is_idle = True
            if iteration.room is not None:
                self._run(idle_from_s, IDLE)

    def _run(self, begin_s: float, reason: str) -> None:
        if reason != self._reasons[-1]:
            begin_s = max(begin_s, self._begins[-1])
            runs, seconds = self._ended.setdefault(self._reasons[-1], ([], []))
            runs.append(len(self._begins) - 1)
            if len(self._begins) > 1:        # the first run has no beginning
                seconds.append((seconds[-1] if seconds else 0.0) + begin_s - self._begins[-1])
            else:
                seconds.append(0.0)
            self._begins.append(begin_s)
            self._reasons.append(reason)

    def _reason_to_leave(self, iteration: IterationTrace) -> str:
        """Return why the iteration left requests in the client."""
        if iteration.room is None:
            return UNKNOWN
        refused = sum(len(ids) for reason, ids in iteration.end_reasons.items() if reason in REFUSALS)
        taken = len(iteration.arrived) + refused
        if iteration.room < 0 or taken < iteration.room:
            return ADMISSIONS if taken == self._most_admissions else FREE_ROOM
        obstacle = next((reason for reason in iteration.waiting if reason != IN_FLIGHT), None)
        return NO_ROOM if obstacle is None else NO_ROOM_AND + obstacle
