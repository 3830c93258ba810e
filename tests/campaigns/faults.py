"""T4: the scenarios of tests/sweep with faults.

A fault occurs at each call of each fault point. An exception of another thread occurs at each instruction where CPython
can raise it. Each way to end a process is repeated many times.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from tests.sweep import interrupted, points, processes
from tests.sweep.scenarios import SCENARIOS

from .portions import each_done
from .registry import Options, Summary

# tier -> (calls at which a point fails, N where one in N places is tried, rows of exceptions, repeats of a process)
ENOUGH = {"Q": (3, 211, 10, 1), "F": (points.MOST_TIMES, 1, 100, 200), "C": (points.MOST_TIMES, 1, 10_000, 2_000)}
PLACES_IN_PARTS = 4
REPEATS_A_PORTION = 50
COSTLY = {"a_hundred_thousand_requests_in_one_get": 10}    # a tenth of the repeats, each of which takes 2 s of CPU

Task = tuple[str, tuple]


def tasks(options: Options) -> Iterator[Task]:
    times, one_in, rows, repeats = ENOUGH[options.tier]
    for name in processes.BY_NAME:
        wanted = -(-repeats // COSTLY.get(name, 1))
        for first in range(0, wanted, REPEATS_A_PORTION):
            yield "process", (name, min(REPEATS_A_PORTION, wanted - first), options.first_seed + first)
    for scenario in SCENARIOS:
        for point in points.POINTS:
            yield "point", (scenario, point, times)
        for part in range(PLACES_IN_PARTS):
            yield "place", (scenario, one_in, part)
        yield "row", (scenario, rows, options.first_seed)


def work(kind: str, arguments: tuple) -> tuple[Counter, list[str]]:
    """Run one task of the sort `kind`: "process", "point", "place" or "rows". Returns (counts, violations)."""
    if kind == "process":
        name, repeats, first = arguments
        result = subprocess.run([sys.executable, "-m", "tests.sweep.processes", name, str(repeats), str(first)],
                                capture_output=True, text=True)
        wrong = result.stdout.splitlines()[:-1]
        if result.returncode and not wrong:
            wrong = [f"{name}: {result.stderr[-300:]}: python -m tests.sweep.processes {name} {repeats} {first}"]
        return Counter({"processes": repeats}), wrong
    if kind == "point":
        scenario, point, times = arguments
        runs, struck, wrong = points.sweep(scenario, points.POINTS[point], times)
        return Counter({"runs": runs, "faults": struck, f"point {point}": struck}), wrong
    if kind == "place":
        scenario, one_in, part = arguments
        _, tried, wrong = interrupted.sweep(
            scenario, lambda place: place % (one_in * PLACES_IN_PARTS) == one_in * part)
        return Counter({"places": tried}), wrong
    scenario, count, seed = arguments
    places, _, _ = interrupted.sweep(scenario, lambda place: False)
    struck, wrong = interrupted.sweep_rows(scenario, places, count, seed)
    return Counter({"rows": count, "struck in rows": struck}), wrong


def run(options: Options) -> Summary:
    counts, wrong, left = Counter(), [], tasks(options)
    for _, (counted, found) in each_done(work, left, options):
        counts.update(counted)
        wrong += found
    num_left = sum(1 for _ in left)
    short = [f"{num_left} tasks were not begun"] if num_left else []
    short += [f"{name}: never failed" for name in points.POINTS if not counts[f"point {name}"]]
    return Summary(
        f"T4: {counts['runs']:,} runs with {counts['faults']:,} faults at {len(points.POINTS)} points in "
        f"{len(SCENARIOS)} scenarios, {counts['places']:,} places of an exception, {counts['rows']:,} rows of "
        f"{counts['struck in rows']:,} exceptions, {counts['processes']:,} processes from repeat "
        f"{options.first_seed} on",
        wrong, short)
