"""Searches for the highest request rate, or the fewest replicas, at which a goal holds.

The goal is that of `batch-manager bench --find-saturation`: requests are completed as fast as they arrive and, with
bounds, a share of them is within the bounds.
"""

from collections.abc import Callable

import numpy as np

from ...errors import counted
from ..bench.load import Load
from ..bench.saturation import Saturation, period_of, probe_load, repetitions
from .traffic import Traffic


class Capacity(Saturation):
    """Result of a search for the fewest replicas that sustain a rate; `broken` is the most replicas that do not."""

    __slots__ = ()

    def words(self) -> str:
        if self.sustained is None:
            finding = f"no number of replicas sustains the rate; the largest one tried was {self.broken:,}"
        elif self.broken is None:
            finding = f"{self.sustained:,} sustain the rate, the smallest number tried"
        else:
            finding = f"{self.sustained:,} sustain the rate, {self.broken:,} do not"
        return f"replicas: {finding} ({self.criterion}; {counted(self.probes, 'run')})"


def find_fewest_replicas(holds: Callable[[int], bool], first: int, most: int, max_probes: int,
                         criterion: str) -> Capacity:
    """Search for the number below which `holds` is false: double the number until it holds, then bisect.

    holds   (number of replicas) -> whether they sustain the rate; called at most `max_probes` times
    first   the first number to try
    most    the largest number to try
    """
    broken, probes, number = 0, 0, first
    sustained: int | None = None
    while probes < max_probes and broken < most and (sustained is None or sustained - broken > 1):
        probes += 1
        if holds(number):
            sustained = number
        else:
            broken = number
        number = min(2 * broken, most) if sustained is None else (broken + sustained) // 2
    return Capacity(sustained, broken or None, probes, criterion)


def probed_traffic(traffic: Traffic, load: Load, max_active: int, engines: int) -> Traffic:
    """Return the traffic of a run of a search, repeated as `bench.saturation.repetitions` says.

    load         at its rate, requests arrive at constant intervals; without a rate, at the times of the traffic
    max_active   largest number of requests that an engine computes at a time
    """
    times_s = traffic.arrival_s if load.request_rate is None else np.arange(len(traffic), dtype=float)
    repeated = repetitions(times_s, traffic.input_tokens, traffic.output_tokens, max_active, engines)
    if load.request_rate is None:
        return traffic.repeated(repeated, np.concatenate(
            [times_s + number * period_of(times_s) for number in range(repeated)]))
    return traffic.repeated(repeated, np.fromiter(probe_load(load, repeated).times(), float, repeated * len(traffic)))
