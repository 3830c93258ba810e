"""Compute the figures of a result from token timestamps.

    ttft        time to the first token, from the arrival of the request
    itl         inter-token latency: time between two consecutive tokens, with one value per pair of tokens
    tpot        time per output token: mean itl of a request, with one value per request
    e2e         time to the last token, from the arrival
    queue       time from the arrival to the first step that computes a part of the prompt
    user_tok_s  tokens/s of a request: 1 / tpot

Latencies exclude failed requests. Without streaming, only e2e and queue are known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .client import Receipt
from .stamps import Stamps

PERCENTILES = (50, 90, 99)
FIGURES_OF_A_TURN = ("prompt_tokens", "output_tokens", "failed", "latency_ms")
LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
NAMES = ("avg", "min", "max", *(f"p{percent}" for percent in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on the latencies of a request, for goodput. None: no bound.

    ttft_ms   time to the first token
    itl_ms    mean time between the tokens of the request; a request with one token is within the bound
    e2e_ms    time to the last token
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def words(self) -> str:
        """Name the bounds, as in "first token 500 ms, end to end 2000 ms"."""
        named = (("first token", self.ttft_ms), ("between tokens", self.itl_ms), ("end to end", self.e2e_ms))
        return ", ".join(f"{words} {value:g} ms" for words, value in named if value is not None)

    def keeps(self, stamps: Stamps) -> np.ndarray:
        """Return [n] bool: whether the latencies of each request are within these bounds.

        The value is False for a request that failed or got no token.
        """
        kept = stamps.is_served
        if self.ttft_ms is not None:
            kept = kept & ((stamps.first_s - stamps.arrival_s) * 1e3 <= self.ttft_ms)
        if self.itl_ms is not None:
            kept = kept & ~(stamps.mean_gaps_s * 1e3 > self.itl_ms)
        if self.e2e_ms is not None:
            kept = kept & ((stamps.last_s - stamps.arrival_s) * 1e3 <= self.e2e_ms)
        return kept


def figures(requests: Sequence[Mapping[str, Any]], receipts: Mapping[int, Receipt], wall_s: float, *,
            streaming: bool, bounds: Bounds = Bounds(), counts_early_ends: bool = True) -> dict[str, Any]:
    """Return the figures of one run.

    wall_s              seconds from the start to the last response
    streaming           whether every token has its own timestamp
    counts_early_ends   whether outputs shorter than requested count towards `wrong_length`; False if an
                        end id can end outputs early
    """
    failures = [(request["id"], receipts[request["id"]].error) for request in requests
                if receipts[request["id"]].error]
    return figures_of(Stamps.of_receipts(requests, receipts), failures, wall_s, streaming=streaming, bounds=bounds,
                      counts_early_ends=counts_early_ends)


def turn_figures(requests: Sequence[Mapping[str, Any]], receipts: Mapping[int, Receipt], wall_s: float, *,
                 streaming: bool) -> list[dict[str, Any]] | None:
    """Return the figures of the first turns of all sessions, of the second turns, and so on. None: no sessions.

    turn, n         the turn, counted from 1, and the number of sessions that have it
    prompt_tokens   tokens of the whole prompts: earlier turns, their answers, and the new turn

    For the arguments and the other figures, see `figures`.
    """
    by_turn: dict[int, list[Mapping[str, Any]]] = {}
    for request in requests:
        if "turn" in request:
            by_turn.setdefault(request["turn"], []).append(request)
    return [turn_entry(turn, len(of), figures(of, receipts, wall_s, streaming=streaming))
            for turn, of in sorted(by_turn.items())] or None


def turn_entry(turn: int, count: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of `turn_figures` for `count` requests, each the `turn`-th of its session.

    values   figures of these requests
    """
    return {"turn": turn, "n": count, **{name: values[name] for name in FIGURES_OF_A_TURN}}


def figures_of(stamps: Stamps, failures: Sequence[tuple[int, str]], wall_s: float, *, streaming: bool = True,
               bounds: Bounds = Bounds(), counts_early_ends: bool = True) -> dict[str, Any]:
    """Return the figures of one run, computed from the time stamps of its requests.

    failures   (id, error) of each failed request

    For the other arguments, see `figures`.
    """
    served, generated, prompts = stamps.is_served, int(stamps.tokens.sum()), int(stamps.prompt_tokens.sum())
    computed_prompts = int(stamps.prompt_tokens[stamps.tokens > 0].sum())
    gaps, counts, tpot = stamps.gaps_s, stamps.gap_counts, stamps.mean_gaps_s[served]
    latencies = {"ttft": (stamps.first_s - stamps.arrival_s)[served], "tpot": tpot[~np.isnan(tpot)],
                 "e2e": (stamps.last_s - stamps.arrival_s)[served], "queue": stamps.queue_s[served]}
    latencies["queue"] = latencies["queue"][~np.isnan(latencies["queue"])]
    if not streaming:
        latencies.update(ttft=np.empty(0), tpot=np.empty(0))
        gaps, counts = np.empty(0), np.empty(0, np.int64)
    wrong = stamps.has_failed | (stamps.tokens > stamps.wanted_tokens)
    if counts_early_ends:
        wrong |= stamps.tokens < stamps.wanted_tokens
    good = len(stamps) - len(failures)
    by_name = {name: summary(values * 1e3) for name, values in latencies.items()}
    itl, ttft, e2e = weighted_summary(gaps * 1e3, counts), by_name["ttft"], by_name["e2e"]
    return {
        "output_tokens": generated,
        "prompt_tokens": prompts,
        "output_tok_s": round(generated / wall_s, 2),
        "total_tok_s": round((computed_prompts + generated) / wall_s, 2),
        **{f"{name}_ms_{which}": values[which] if values else None
           for name, values in (("ttft", ttft), ("itl", itl)) for which in ("p50", "p99")},
        "itl_ms_mean": itl["avg"] if itl else None,
        **{f"e2e_ms_{which}": e2e[which] if e2e else None for which in ("p50", "p99")},
        "wrong_length": int(wrong.sum()),
        "failed": len(failures),
        "failures": [{"id": request_id, "error": error} for request_id, error in failures[:MOST_FAILURES]],
        "requests_s": round(good / wall_s, 4),
        "requested_tok_s": round(int(stamps.wanted_tokens[~stamps.has_failed].sum()) / wall_s, 2),
        "latency_ms": {name: itl if name == "itl" else by_name[name] for name in LATENCIES},
        "user_tok_s": summary(1 / tpot[tpot > 0]),
        "completion_rate": completion_rate(stamps.final_s[~stamps.has_failed]),
        "arrival_window_rate": arrival_window_rate(stamps.arrival_s, stamps.final_s),
        "goodput": goodput(stamps, wall_s, bounds) if bounds else None,
    }


MOST_FAILURES = 20      # most failures that a result lists


def summary(values: np.ndarray) -> dict[str, float] | None:
    """Return the average, minimum, maximum and percentiles of the values by name; None if there are no values."""
    if not len(values):
        return None
    numbers = values.mean(), values.min(), values.max(), *np.percentile(values, PERCENTILES)
    return {name: round(float(value), 3) for name, value in zip(NAMES, numbers, strict=True)}


def weighted_summary(values: np.ndarray, counts: np.ndarray) -> dict[str, float] | None:
    """Return the average, minimum, maximum and percentiles of the values by name; None if there are no values.

    counts   how often each value occurs
    """
    order = np.argsort(values, kind="stable")
    values, ends = values[order], np.cumsum(counts[order])
    if not len(values):
        return None
    ranks = np.array(PERCENTILES) / 100 * (ends[-1] - 1)        # the same interpolation as numpy.percentile
    below = values[np.searchsorted(ends, np.floor(ranks), side="right")]
    above = values[np.searchsorted(ends, np.ceil(ranks), side="right")]
    percentiles = below + (above - below) * (ranks - np.floor(ranks))
    mean = float((values * counts[order]).sum() / ends[-1])
    numbers = mean, values[0], values[-1], *percentiles
    return {name: round(float(value), 3) for name, value in zip(NAMES, numbers, strict=True)}


def completion_rate(finals_s: np.ndarray) -> float | None:
    """Return the requests/s completed between the first and the last final response.

    This interval excludes the ramp-up before the first response. None: fewer than two requests ended, or all ended at
    the same time.

    finals_s   times of the final responses of requests that did not fail; NaN: no response
    """
    finals_s = finals_s[~np.isnan(finals_s)]
    span = float(np.ptp(finals_s)) if len(finals_s) > 1 else 0.0
    return round((len(finals_s) - 1) / span, 4) if span > 0 else None


def arrival_window_rate(arrivals_s: np.ndarray, finals_s: np.ndarray) -> float | None:
    """Return the requests/s completed in the second half of the time in which requests arrive.

    This is the arrival rate less the growth of the mean number of requests in progress from the third to the last
    quarter of that time. The first half, in which an empty engine fills up, is left out. None: all arrive at once.

    finals_s   times of the final responses; NaN: no response
    """
    first, span = float(arrivals_s.min()), float(np.ptp(arrivals_s))
    if span <= 0:
        return None
    quarter = span / 4
    ends_s = np.where(np.isnan(finals_s), np.inf, finals_s)
    third, last = (
        np.clip(np.minimum(ends_s, begin + quarter) - np.maximum(arrivals_s, begin), 0, None).sum() / quarter
        for begin in (first + 2 * quarter, first + 3 * quarter))
    return round((len(arrivals_s) - 1) / span - float(last - third) / quarter, 4)


def goodput(stamps: Stamps, wall_s: float, bounds: Bounds) -> dict[str, float | None]:
    """Return the latency bounds, and figures of the requests within them.

    ttft_ms, itl_ms, e2e_ms   the bounds in milliseconds
    requests_s                requests within the bounds, per second
    share                     requests within the bounds, as a fraction of all requests
    """
    kept = int(bounds.keeps(stamps).sum())
    return {**asdict(bounds), "requests_s": round(kept / wall_s, 4), "share": round(kept / len(stamps), 4)}
