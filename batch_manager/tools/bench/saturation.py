"""Find the highest request rate that an engine sustains, by bisection."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import counted
from .errors import BenchmarkError
from .load import Load
from .metrics import Bounds

SUSTAINED_SHARE = 0.95      # least completion rate while requests arrive, as a share of the arrival rate
CLOSE = 1.05                # the search ends when the two rates differ by less than this factor
GROWTH = 1.5                # factor of the next rate while every rate so far was sustained
FEWEST_REQUESTS = 10        # with fewer requests, a rate is meaningless
WITH_SESSIONS = ("{option} was given and the workload has sessions, whose later turns arrive after answers; expected "
                 "requests with a rate; pass --turns 1, or --sweep request_rate=...")
BATCHES, MOST_REPEATED = 16, 2048    # full batches in a run, up to this number of requests; a smaller workload repeats


@dataclass(frozen=True, slots=True)
class Saturation:
    """Result of a search. Rates are requests/s.

    sustained   the highest sustained rate; None: no rate was sustained
    broken      the lowest rate that was not sustained; None: all tried rates were sustained
    probes      number of runs, including the first run, in which all requests arrive at once
    criterion   condition for a sustained rate, in words
    """

    sustained: float | None
    broken: float | None
    probes: int
    criterion: str

    def words(self) -> str:
        if self.sustained is None:
            finding = f"no rate was sustained; the lowest one tried was {self.broken:.4g} requests/s"
        elif self.broken is None:
            finding = f"{self.sustained:.4g} requests/s are sustained, the highest rate tried"
        else:
            finding = f"{self.sustained:.4g} requests/s are sustained, {self.broken:.4g} are not"
        return f"saturation: {finding} ({self.criterion}; {counted(self.probes, 'run')})"


def find_saturation(serve_at_once: Callable[[], dict[str, Any]], holds: Callable[[float], bool], max_probes: int,
                    criterion: str) -> Saturation:
    """Search for the rate above which `holds` is false: raise the rate until it is not sustained, then bisect.

    The throughput with all requests at once estimates the highest possible rate. It is the first rate to try.

    serve_at_once   serves all requests at once and returns the result
    holds           (requests/s) -> whether the engine sustains this rate
    max_probes      largest number of runs, the first one included

    Raises BenchmarkError if every request of the first run fails.
    """
    at_once = serve_at_once()
    if not at_once["requests_s"]:
        raise BenchmarkError("every request failed when all arrived at once, the first with: "
                             f"{at_once['failures'][0]['error']}")
    sustained, broken, rate, probes = 0.0, None, _rounded(at_once["requests_s"]), 1
    while probes < max_probes and not (broken is not None and sustained and broken / sustained < CLOSE):
        probes += 1
        if holds(rate):
            sustained = rate
        else:
            broken = rate
        rate = _rounded(rate * GROWTH if broken is None else (sustained + broken) / 2)
    return Saturation(sustained or None, broken, probes, criterion)


def _rounded(rate: float) -> float:
    """Round to four significant digits. More digits would claim too much precision."""
    return float(f"{rate:.4g}")


def is_sustained(result: dict[str, Any], bounds: Bounds, share: float) -> bool:
    """Return whether the engine sustained the request rate of a run.

    The requests must be completed at the rate at which they arrive, less 5 %, while they arrive; otherwise their number
    in progress grows, and a longer run breaks every bound. A rate with a failed request is not sustained.

    bounds   upper bounds on latencies, in addition
    share    smallest share of the requests that must be within the bounds
    """
    if result["failed"] or not result["offered_rate"]:
        return False
    completed = result["arrival_window_rate"]
    if completed is None or completed < SUSTAINED_SHARE * result["offered_rate"]:
        return False
    return not bounds or result["goodput"]["share"] >= share


def criterion_of(bounds: Bounds, share: float) -> str:
    completed = f"requests are completed at {SUSTAINED_SHARE} of the arrival rate or more while they arrive"
    return f"{completed}, {share:.0%} of them within {bounds.words()}" if bounds else completed


def probe_load(load: Load, repeated: int) -> Load:
    """Return the load of a run of a search: the workload `repeated` times, its requests at constant intervals.

    The chance of exponential intervals would move the completion rate of a few requests by more than the 5 % that
    decide.
    """
    return replace(load, delays="constant", repetitions=repeated)


def repetitions(arrival_s: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray, max_active: int,
                engines: int = 1) -> int:
    """Return how often a run repeats a workload, so that a full batch is a small part of the run.

    `arrival_window_rate` compares quarters of the run, which must have about the same work. A workload is therefore
    repeated once more until no quarter of the run deviates by more than 5 % from a quarter of its requests, its prompt
    tokens or its output tokens; a number that four divides gives equal quarters. A small workload is repeated at least
    four times.

    arrival_s       [n] arrival times within one repetition, ascending, in any unit
    prompt_tokens, output_tokens   [n]
    max_active      largest number of requests that an engine computes at a time
    engines         number of engines that share the workload
    """
    count = len(arrival_s)
    repeated = -(-min(BATCHES * max_active, MOST_REPEATED) * engines // count)
    if 4 * count <= MOST_REPEATED * engines:
        repeated = max(repeated, 4)
    places = (arrival_s - arrival_s[0]) / period_of(arrival_s)         # 0 to below 1
    amounts = np.stack([np.ones(count), prompt_tokens, output_tokens])
    while repeated % 4 and not _are_alike(places, amounts / amounts.sum(axis=1, keepdims=True), repeated):
        repeated += 1
    return repeated


def period_of(arrival_s: np.ndarray) -> float:
    """Return the seconds from the begin of a workload to that of its repetition, at its own mean rate."""
    return float(np.ptp(arrival_s)) * len(arrival_s) / (len(arrival_s) - 1)


def _are_alike(places: np.ndarray, shares: np.ndarray, repeated: int) -> bool:
    """Return whether each quarter of `repeated` workloads has about a quarter of each amount.

    places   [n] time of each request, as a fraction of a repetition
    shares   [amounts, n] share of each request in each amount of a repetition
    """
    quarters = (4 * (np.arange(repeated)[:, None] + places) / repeated).astype(np.int64).ravel()
    return all(np.allclose(np.bincount(quarters, np.tile(share, repeated), 4) * 4 / repeated, 1,
                           rtol=0, atol=1 - SUSTAINED_SHARE) for share in shares)
