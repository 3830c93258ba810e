"""How the requests of a workload arrive."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """At most one of the two is set. With neither, requests arrive when the workload says.

    request_rate   requests a second; 0 or less: all at once
    concurrency    requests under way at a time; each of the others arrives when one is done
    exponential    at a rate: times between arrivals are drawn, so that they are a Poisson process; otherwise all equal
    random_seed    of these draws
    """

    request_rate: float | None = None
    concurrency: int | None = None
    exponential: bool = False
    random_seed: int = 0

    def arriving(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The requests with their arrival times, the first at 0; at a rate in the order in which the workload has
        them."""
        if self.concurrency is not None or (self.request_rate is not None and self.request_rate <= 0):
            return [dict(request, arrival_s=0.0) for request in requests]
        if self.request_rate is None:
            return requests
        between = np.full(len(requests), 1 / self.request_rate)
        if self.exponential:
            between = np.random.default_rng(self.random_seed).exponential(1 / self.request_rate, len(requests))
        arrivals = np.cumsum(between) - between[0]
        ordered = sorted(requests, key=lambda request: request["arrival_s"])
        return [dict(request, arrival_s=round(float(arrival), 6))
                for request, arrival in zip(ordered, arrivals, strict=True)]

    def offered_rate(self, requests: list[dict[str, Any]]) -> float | None:
        """Requests a second that arrive between the first and the last one. None: they arrive at once, or in a closed
        loop.

        requests   as `arriving` returned them
        """
        arrivals = [request["arrival_s"] for request in requests]
        span = max(arrivals) - min(arrivals)
        return (len(arrivals) - 1) / span if self.concurrency is None and span > 0 else None
