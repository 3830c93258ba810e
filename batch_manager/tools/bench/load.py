"""The arrival process of a workload."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """The arrival process. At most one of rate and concurrency is set.

    If neither is set, requests arrive at the times of the workload.

    request_rate   requests/s; 0 or less: all at once
    concurrency    requests in progress at a time; the next request arrives when one is done
    exponential    distribution of the times between arrivals, used with a rate. True: exponential (a Poisson process);
                   False: all equal
    random_seed    seed of the exponential times
    repetitions    how often the workload is served, one time after the other, with new ids; used with a rate
    """

    request_rate: float | None = None
    concurrency: int | None = None
    exponential: bool = False
    random_seed: int = 0
    repetitions: int = 1

    def arriving(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the requests with the arrival times of this load.

        Returns `requests` itself if the requests keep their times.

        If `request_rate` is above 0, the requests keep the order of their times in the workload, and the first
        one arrives at 0 s. A repeated request has the key `repetition`, the number of times it was served before.
        """
        if self.concurrency is not None or (self.request_rate is not None and self.request_rate <= 0):
            return [dict(request, arrival_s=0.0) for request in requests]
        if self.request_rate is None:
            return requests
        ordered = sorted(requests, key=lambda request: request["arrival_s"])
        if self.repetitions > 1:
            step = 1 + max(request["id"] for request in requests)
            ordered = [dict(request, id=request["id"] + number * step, repetition=number)
                       for number in range(self.repetitions) for request in ordered]
        between = np.full(len(ordered), 1 / self.request_rate)
        if self.exponential:
            between = np.random.default_rng(self.random_seed).exponential(1 / self.request_rate, len(ordered))
        arrivals = np.cumsum(between) - between[0]
        return [dict(request, arrival_s=round(float(arrival), 6))
                for request, arrival in zip(ordered, arrivals, strict=True)]

    def offered_rate(self, requests: list[dict[str, Any]]) -> float | None:
        """Return the requests/s between the first and the last arrival. None: all arrive at once, or a closed loop.

        requests   as returned by `arriving`
        """
        arrivals = [request["arrival_s"] for request in requests]
        span = max(arrivals) - min(arrivals)
        return (len(arrivals) - 1) / span if self.concurrency is None and span > 0 else None
