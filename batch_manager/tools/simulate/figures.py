"""The figures of a simulation: the figures of a benchmark, and a few that only simulations have."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bench.load import Load
from ..bench.metrics import Bounds, figures_of, turn_entry
from ..bench.stamps import Stamps
from .fleet import Run
from .traffic import Turns


def point_fields(run: Run, load: Load, mode: str, bounds: Bounds, simulated_in_s: float) -> dict[str, Any]:
    """Return the figures of one simulation, under the field names that `batch-manager bench` uses.

    extrapolated   two entries. `share`: share of the steps in which a field of StepShape is above the fitted range of
                   the cost model. `steps`: name of a field -> number of steps in which it is above its range
    replicas       see `balance`
    turns          as in bench, but `itl` is None: a simulation counts the times between tokens of all turns together
    """
    stamps = stamps_of(run)
    failures = sorted(run.log_book.errors.items())
    steps = sum(replica.backend.steps for replica in run.replicas)
    beyond: dict[str, int] = {}
    for replica in run.replicas:
        for name, count in replica.backend.beyond.items():
            beyond[name] = beyond.get(name, 0) + count
    steps_beyond = sum(replica.backend.steps_beyond for replica in run.replicas)
    wall_s = max(run.wall_s, 1e-9)
    turns = run.traffic.turns
    is_arrival = np.ones(len(stamps), bool) if turns is None else turns.number == 1
    span = float(np.ptp(stamps.arrival_s[is_arrival]))
    return {
        "mode": mode,
        "sessions": None if turns is None else turns.num_sessions,
        "request_rate": load.request_rate,
        "delays": load.delays if load.request_rate else None,
        "concurrency": load.concurrency,
        "offered_rate": round((int(is_arrival.sum()) - 1) / span, 4) if not load.is_closed and span > 0 else None,
        "wall_s": round(wall_s, 4),
        **figures_of(stamps, failures, wall_s, bounds=bounds),
        "turns": None if turns is None else turn_figures(stamps, turns, run.log_book.errors, wall_s),
        "steps": steps,
        "busy_share": round(sum(replica.backend.busy_s for replica in run.replicas) / (wall_s * len(run.replicas)), 4),
        "reused_tokens": sum(replica.reused_tokens for replica in run.replicas),
        "recomputed_tokens": sum(replica.recomputed_tokens for replica in run.replicas),
        "extrapolated": {"share": round(steps_beyond / max(steps, 1), 4), "steps": beyond},
        "replicas": balance(run),
        "simulated_in_s": round(simulated_in_s, 2),
    }


def turn_figures(stamps: Stamps, turns: Turns, errors: Mapping[int, str], wall_s: float) -> list[dict[str, Any]]:
    """Return the figures of the first turns of all sessions, of the second turns, and so on, as bench does."""
    found = []
    for turn in range(1, int(turns.number.max()) + 1):
        chosen = np.flatnonzero((turns.session >= 0) & (turns.number == turn))
        failures = [(index, errors[index]) for index in chosen.tolist() if index in errors]
        found.append(turn_entry(turn, len(chosen), figures_of(stamps.without_gaps(chosen), failures, wall_s)))
    return found


def stamps_of(run: Run) -> Stamps:
    """Return the time stamps of the requests, in the order of the traffic."""
    book, traffic = run.log_book, run.traffic
    gaps, counts = book.gaps()
    has_failed = np.zeros(len(traffic), bool)
    has_failed[list(book.errors)] = True
    return Stamps(
        arrival_s=np.array(run.arrival_s, float), first_s=book.first_s, last_s=book.last_s, final_s=book.last_s,
        queue_s=np.full(len(traffic), np.nan), tokens=book.tokens, wanted_tokens=traffic.output_tokens,
        prompt_tokens=traffic.input_tokens, has_failed=has_failed, gaps_s=gaps, gap_counts=counts)


def balance(run: Run) -> dict[str, Any]:
    """Return the number of replicas, and how unevenly the load was divided.

    Requests, output tokens and seconds of steps are [smallest value of a replica, largest value of a replica].
    """
    count = len(run.replicas)
    served = np.bincount(run.log_book.replica[run.log_book.replica >= 0], minlength=count)
    tokens = np.bincount(run.log_book.replica.clip(min=0), weights=run.log_book.tokens, minlength=count)
    return {"count": count, "requests": [int(served.min()), int(served.max())],
            "output_tokens": [int(tokens.min()), int(tokens.max())],
            "busy_s": [round(min(replica.backend.busy_s for replica in run.replicas), 3),
                       round(max(replica.backend.busy_s for replica in run.replicas), 3)]}
