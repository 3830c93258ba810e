"""From stamps to figures.

    ttft        time to the first token, from the arrival of the request
    itl         time between two tokens that follow each other: every such time of every request counts
    tpot        time per output token: for each request the mean of its itl
    e2e         time to the last token, from the arrival
    queue       time from the arrival to the first step that computes something of the prompt
    user_tok_s  tokens a second that one user sees: for each request 1 / tpot

Requests that failed are in no latency. Without streaming only e2e is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .client import Receipt

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
NAMES = ("avg", "min", "max", *(f"p{percent}" for percent in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Latencies that a request must keep to count for the goodput. None: this one does not matter.

    ttft_ms   of the time to the first token
    itl_ms    of the request's mean time between tokens; a request of one token keeps it
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def kept_by(self, receipt: Receipt) -> bool:
        """False for a request that failed, or got no token."""
        if receipt.error or not receipt.times:
            return False
        ttft_ms, itl = (receipt.times[0] - receipt.arrival_s) * 1e3, mean_itl_s(receipt)
        return ((self.ttft_ms is None or ttft_ms <= self.ttft_ms)
                and (self.itl_ms is None or itl is None or itl * 1e3 <= self.itl_ms))


def mean_itl_s(receipt: Receipt) -> float | None:
    """Mean time between the tokens of a request. None: it has fewer than two."""
    times = receipt.times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def latencies_s(receipts: Sequence[Receipt], *, streaming: bool) -> dict[str, np.ndarray]:
    """Name of LATENCIES -> what was measured of it, in seconds; empty arrays for what is not known."""
    done = [receipt for receipt in receipts if receipt.times and not receipt.error]
    found = {
        "ttft": [receipt.times[0] - receipt.arrival_s for receipt in done],
        "itl": np.concatenate([np.empty(0), *(np.diff(receipt.times) for receipt in done)]),
        "tpot": [itl for receipt in done if (itl := mean_itl_s(receipt)) is not None],
        "e2e": [receipt.times[-1] - receipt.arrival_s for receipt in done],
        "queue": [receipt.queue_s for receipt in done if receipt.queue_s is not None],
    }
    if not streaming:
        found.update(ttft=[], itl=[], tpot=[])
    return {name: np.asarray(values, float) for name, values in found.items()}


def figures(requests: Sequence[Mapping[str, Any]], receipts: Mapping[int, Receipt], wall_s: float, *,
            streaming: bool, bounds: Bounds = Bounds(), counts_early_ends: bool = True) -> dict[str, Any]:
    """What a result says of one serving.

    wall_s              from the start to the last response
    streaming           whether tokens were stamped one by one
    counts_early_ends   a request with fewer tokens than it asked for has the wrong length; False: an end id is set
    """
    of = [receipts[request["id"]] for request in requests]
    latencies = latencies_s(of, streaming=streaming)
    wrong = sum(bool(receipt.error) or len(receipt.tokens) > request["max_tokens"]
                or (counts_early_ends and len(receipt.tokens) < request["max_tokens"])
                for request, receipt in zip(requests, of))
    failed = [(request["id"], receipt.error) for request, receipt in zip(requests, of) if receipt.error]
    generated, prompts = sum(len(receipt.times) for receipt in of), sum(len(request["prompt"]) for request in requests)
    requested = sum(request["max_tokens"] for request, receipt in zip(requests, of) if not receipt.error)
    itl, good = latencies["itl"], len(of) - len(failed)
    return {
        "output_tokens": generated,
        "prompt_tokens": prompts,
        "output_tok_s": round(generated / wall_s, 2),
        "total_tok_s": round((prompts + generated) / wall_s, 2),
        **{f"{name}_ms_p{percent}": percentile_ms(latencies[name], percent) for name in ("ttft", "itl")
           for percent in (50, 99)},
        "itl_ms_mean": round(float(itl.mean()) * 1e3, 3) if len(itl) else None,
        "e2e_ms_p50": percentile_ms(latencies["e2e"], 50),
        "e2e_ms_p99": percentile_ms(latencies["e2e"], 99),
        "wrong_length": wrong,
        "failed": len(failed),
        "failures": [{"id": request_id, "error": error} for request_id, error in failed[:MOST_FAILURES]],
        "requests_s": round(good / wall_s, 4),
        "requested_tok_s": round(requested / wall_s, 2),
        "latency_ms": {name: summary(values * 1e3) for name, values in latencies.items()},
        "user_tok_s": summary(1 / latencies["tpot"][latencies["tpot"] > 0]),
        "completion_rate": completion_rate(of),
        "goodput": goodput(of, wall_s, bounds) if bounds else None,
    }


MOST_FAILURES = 20      # that a result names


def summary(values: np.ndarray) -> dict[str, float] | None:
    """Average, extremes and percentiles. None: there are no values."""
    if not len(values):
        return None
    numbers = values.mean(), values.min(), values.max(), *np.percentile(values, PERCENTILES)
    return {name: round(float(value), 3) for name, value in zip(NAMES, numbers, strict=True)}


def percentile_ms(seconds: np.ndarray, percent: float) -> float | None:
    return round(float(np.percentile(seconds, percent)) * 1e3, 3) if len(seconds) else None


def completion_rate(receipts: Sequence[Receipt]) -> float | None:
    """Requests a second that were done between the first final response and the last one: what there is before, while
    the first request is computed, does not count. None: fewer than two ended, or all at once."""
    finals = sorted(receipt.final_s for receipt in receipts if receipt.final_s is not None and not receipt.error)
    span = finals[-1] - finals[0] if len(finals) > 1 else 0.0
    return round((len(finals) - 1) / span, 4) if span > 0 else None


def goodput(receipts: Sequence[Receipt], wall_s: float, bounds: Bounds) -> dict[str, float | None]:
    """Requests that keep the bounds: a second, and as a share of all."""
    kept = sum(map(bounds.kept_by, receipts))
    return {"ttft_ms": bounds.ttft_ms, "itl_ms": bounds.itl_ms, "requests_s": round(kept / wall_s, 4),
            "share": round(kept / len(receipts), 4)}
