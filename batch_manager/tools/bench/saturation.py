"""The highest request rate that an engine sustains, by bisection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .metrics import Bounds

SUSTAINED_SHARE = 0.95      # of the offered rate, that requests are done at
CLOSE = 1.05                # the two rates are as near as this, as a factor
GROWTH = 1.5                # of a rate that holds, while none is known that does not
FEWEST_REQUESTS = 10        # of a workload: with fewer a rate says nothing


@dataclass(frozen=True, slots=True)
class Saturation:
    """Requests a second.

    sustained   the highest rate that held; None: none did
    broken      the lowest rate that did not; None: all did
    probes      servings, including the first one of `batch-manager bench`, in which all requests arrive at once
    criterion   what a rate had to hold, in words
    """

    sustained: float | None
    broken: float | None
    probes: int
    criterion: str

    def words(self) -> str:
        if self.sustained is None:
            told = f"no rate was sustained; the lowest that was tried is {self.broken:.4g} requests/s"
        elif self.broken is None:
            told = f"{self.sustained:.4g} requests/s are sustained, and so was every lower rate that was tried"
        else:
            told = f"{self.sustained:.4g} requests/s are sustained, {self.broken:.4g} are not"
        return f"saturation: {told} ({self.criterion}; {self.probes} servings)"


def find_saturation(holds: Callable[[float], bool], first_rate: float, max_probes: int, criterion: str) -> Saturation:
    """Bisect the rate at which `holds` becomes false.

    holds        (requests a second) -> whether the engine sustained it; called at most `max_probes` times
    first_rate   that is tried first
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
    """To four digits: more of them would promise too much."""
    return float(f"{rate:.4g}")


def is_sustained(result: dict[str, Any], bounds: Bounds, share: float) -> bool:
    """Whether a serving at a request rate kept up.

    bounds, share   so many of the requests keep the bounds. Without bounds: they are done at SUSTAINED_SHARE of the
                    rate at which they arrive
    """
    if result["failed"]:
        return False
    if bounds:
        return result["goodput"]["share"] >= share
    return (result["completion_rate"] or 0.0) >= SUSTAINED_SHARE * result["offered_rate"]


def criterion_of(bounds: Bounds, share: float) -> str:
    if not bounds:
        return f"requests are done at {SUSTAINED_SHARE} of the rate at which they arrive"
    named = [f"{words} {value:g} ms" for words, value in (("first token", bounds.ttft_ms),
                                                          ("between tokens", bounds.itl_ms)) if value is not None]
    return f"{share:.0%} of the requests within {', '.join(named)}"
