"""Batch sizes, tokens and KV cache use of the iterations of a run, from the statistics of the engine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_SPANS = 240            # in a plot; more iterations are averaged into this many spans
MOST_SIZES, FEWEST_STEPS = 16, 5    # most points in a plot by batch size, and fewest steps for a point


@dataclass(frozen=True, slots=True)
class Iteration:
    """One record of the statistics.

    begin_s, end_s   seconds since the beginning of the first iteration. An iteration begins when the previous iteration
                     ends, or later if the engine was idle between them
    context          number of prompt tokens computed
    generating       number of requests in the generation phase; 0 in the first iteration after an idle time
    used             number of KV cache blocks that running requests hold
    cached           number of free KV cache blocks whose content can be reused
    blocks           number of blocks in the pool
    since_s          seconds from the end of the previous iteration of the same micro-batch to end_s.
                     None: the micro-batch did not run in its previous turn
    """

    begin_s: float
    end_s: float
    context: int
    generating: int
    used: int
    cached: int
    blocks: int
    since_s: float | None


def iterations_of(records: Sequence[str]) -> list[Iteration]:
    """Parse the statistics records of an engine with in-flight batching, in order."""
    found: list[Iteration] = []
    previous: dict[int, tuple[int, float]] = {}         # micro-batch -> counter and end of its latest record
    start = None
    for record in map(json.loads, records):
        end = record["Monotonic Microseconds"] / 1e6
        began = end - record["Iteration Latency Microseconds"] / 1e6
        start = began if start is None else start
        begin = max(began - start, found[-1].end_s) if found else 0.0
        if found and record["Active Request Count"] > record["New Requests"]:       # not idle before this iteration
            begin = found[-1].end_s
        counter, micro_batch = record["Iteration Counter"], record["MicroBatch ID"]
        before = previous.get(micro_batch)
        # At most one record of another micro-batch is between two records of the same micro-batch.
        is_next = before is not None and counter - before[0] <= 2
        previous[micro_batch] = counter, end
        found.append(Iteration(
            begin, max(end - start, begin), record["Total Context Tokens"], record["Generation Requests"],
            record["Used KV cache blocks"], record["Cached KV cache blocks"], record["Max KV cache blocks"],
            end - before[1] if is_next else None))
    return found


def with_idle_times(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Return the iterations, with an idle iteration in each gap. In an idle iteration no request runs.

    An idle iteration has the same number of cached blocks as the iteration before the gap.
    """
    out = list(iterations[:1])
    for one in iterations[1:]:
        if one.begin_s > out[-1].end_s:
            out.append(replace(one, begin_s=out[-1].end_s, end_s=one.begin_s, context=0, generating=0, used=0,
                               cached=out[-1].cached, since_s=None))
        out.append(one)
    return out


def over_time(iterations: Sequence[Iteration], amounts: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return (begin_s, end_s, amount) for each iteration.

    If there are more than MOST_SPANS iterations, returns (begin_s, end_s, mean amount) for MOST_SPANS spans of equal
    length instead. In a mean, the time between iterations counts with the amount 0.

    amounts   amount of each iteration, in order
    """
    begins = np.array([one.begin_s for one in iterations])
    ends = np.array([one.end_s for one in iterations])
    if len(iterations) <= MOST_SPANS:
        return list(zip(begins.tolist(), ends.tolist(), amounts))
    of = np.array(amounts, float)
    sums = np.concatenate([[0.0], np.cumsum(of * (ends - begins))])     # amount times seconds, up to each end
    knots = np.stack([begins, ends], 1).ravel()
    edges = np.linspace(0.0, ends[-1], MOST_SPANS + 1)
    between = np.diff(np.interp(edges, knots, np.stack([sums[:-1], sums[1:]], 1).ravel()))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), (between / np.diff(edges)).tolist()))


def times_by_batch(iterations: Sequence[Iteration], *, with_contexts: bool
                   ) -> list[tuple[float, float, float, float]]:
    """Return (batch size, p10, median, p90) for each batch size.

    The numbers p10, median and p90 are seconds between two tokens of a request. The batch size is the number of
    generating requests in the step. A batch size with few steps is merged with the next larger sizes. For merged
    sizes, the returned batch size is the mean of the batch sizes of all their steps.

    with_contexts   True: use only steps that also compute prompts; False: use only the other steps
    """
    pairs = sorted((one.generating, one.since_s) for one in iterations
                   if one.generating and one.since_s is not None and bool(one.context) is with_contexts)
    enough = max(FEWEST_STEPS, len(pairs) / MOST_SIZES)
    groups: list[list[tuple[int, float]]] = [[]]
    for pair in pairs:
        if len(groups[-1]) >= enough and pair[0] != groups[-1][-1][0]:
            groups.append([])
        groups[-1].append(pair)
    if len(groups) > 1 and len(groups[-1]) < FEWEST_STEPS:
        last = groups.pop()
        groups[-1] += last
    out = []
    for group in groups if pairs else ():
        sizes, seconds = np.array(group).T
        out.append((float(sizes.mean()), *np.percentile(seconds, (10, 50, 90)).tolist()))
    return out
