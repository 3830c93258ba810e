"""Find the highest request rate that an engine sustains, by bisection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .metrics import Bounds

SUSTAINED_SHARE = 0.95      # least completion rate, as a share of the offered rate
CLOSE = 1.05                # the search ends when the two rates differ by less than this factor
GROWTH = 1.5                # factor of the next rate while every rate so far was sustained
FEWEST_REQUESTS = 10        # with fewer requests, a rate is meaningless


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
        return f"saturation: {finding} ({self.criterion}; {self.probes} runs)"


def find_saturation(holds: Callable[[float], bool], first_rate: float, max_probes: int, criterion: str) -> Saturation:
    """Search for the rate above which `holds` is false: raise the rate until it is not sustained, then bisect.

    holds        (requests/s) -> whether the engine sustains this rate; called at most `max_probes` times
    first_rate   the first rate to try
    """
    sustained, broken, rate, probes = 0.0, None, _rounded(first_rate), 0
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
    """Return whether the engine sustained the request rate of a run. A rate with a failed request is not sustained.

    bounds   upper bounds on latencies. Without bounds, the completion rate must be at least 95% of the arrival rate
    share    smallest share of the requests that must be within the bounds
    """
    if result["failed"]:
        return False
    if bounds:
        return result["goodput"]["share"] >= share
    return (result["completion_rate"] or 0.0) >= SUSTAINED_SHARE * result["offered_rate"]


def criterion_of(bounds: Bounds, share: float) -> str:
    if not bounds:
        return f"the completion rate is at least {SUSTAINED_SHARE} of the arrival rate"
    named = [f"{words} {value:g} ms" for words, value in (("first token", bounds.ttft_ms),
                                                          ("between tokens", bounds.itl_ms)) if value is not None]
    return f"{share:.0%} of the requests within {', '.join(named)}"
