"""The arrival process of a workload."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..datasets.selection import arrival_times
from .sessions import is_later_turn


@dataclass(frozen=True, slots=True)
class Load:
    """The arrival process.

    If neither rate nor concurrency is set, requests arrive at the times of the workload. A session arrives with its
    first turn; the later turns arrive after answers, whatever the load.

    request_rate   requests/s, in a workload with sessions also sessions/s; 0: all at once
    concurrency    requests in progress at a time. Without a rate above 0, the next request or session arrives when one
                   is done (a closed loop). With one, arrived requests wait until fewer are in progress
    delays         times between arrivals, used with a rate: "exponential" (a Poisson process) or "constant"
    random_seed    seed of the exponential times
    repetitions    how often the workload is served, one time after the other, with new ids; used with a rate
    """

    request_rate: float | None = None
    concurrency: int | None = None
    delays: str = "exponential"
    random_seed: int = 0
    repetitions: int = 1

    @property
    def is_closed(self) -> bool:
        return self.concurrency is not None and not self.request_rate

    def arriving(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the requests with the arrival times of this load.

        Returns the same objects if the requests keep their times and have no sessions.

        If `request_rate` is above 0, the requests keep the order of their times in the workload, and the first
        one arrives at 0 s. A repeated request has the key `repetition`, the number of times it was served before.
        """
        if self.is_closed or self.request_rate == 0:
            return [dict(request, arrival_s=0.0) for request in requests]
        if self.request_rate is None:
            return [dict(request) if "turn" in request else request for request in requests]
        ordered = sorted(requests, key=lambda request: request["arrival_s"])
        if self.repetitions > 1:
            step = 1 + max(request["id"] for request in requests)
            ordered = [dict(request, id=request["id"] + number * step, repetition=number)
                       for number in range(self.repetitions) for request in ordered]
        times = self.times()
        starts: dict[int | None, float] = {}        # session -> arrival of its first turn
        arriving = []
        for request in ordered:
            session = request.get("session")
            starts[session] = starts[session] if is_later_turn(request) else next(times)
            arriving.append(dict(request, arrival_s=starts[session]))
        return arriving

    def times(self) -> Iterator[float]:
        """Yield the arrival times in seconds, without end. The load must have a rate above 0."""
        assert self.request_rate
        return arrival_times(self.request_rate, self.delays, self.random_seed)

    def offered_rate(self, requests: list[dict[str, Any]]) -> float | None:
        """Return the requests/s, or sessions/s, between the first and the last arrival.

        None: all arrive at once, or a closed loop.

        requests   as returned by `arriving`
        """
        arrivals = [request["arrival_s"] for request in requests if not is_later_turn(request)]
        span = max(arrivals) - min(arrivals)
        return (len(arrivals) - 1) / span if not self.is_closed and span > 0 else None
