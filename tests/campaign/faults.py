"""T4: every fault point at every time, every place for an exception, every way to end many times."""

import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

from tests.sweep import interrupted, points, processes
from tests.sweep.scenarios import SCENARIOS

from .registry import Options, Summary

# tier -> (times of a point, one place in so many, pairs of places of a scenario, repeats of a process)
ENOUGH = {"Q": (3, 211, 10, 1), "F": (points.MOST_TIMES, 1, 100, 200), "C": (points.MOST_TIMES, 1, 10_000, 2_000)}
PLACES_IN_PARTS = 4
REPEATS_A_PORTION = 50
COSTLY = {"a_hundred_thousand_requests_in_one_get": 10}    # takes two seconds of a processor: a tenth of the repeats

Task = tuple[str, tuple]


def tasks(options: Options) -> Iterator[Task]:
    times, one_in, pairs, repeats = ENOUGH[options.tier]
    for name in processes.BY_NAME:
        wanted = -(-repeats // COSTLY.get(name, 1))
        for first in range(0, wanted, REPEATS_A_PORTION):
            yield "process", (name, min(REPEATS_A_PORTION, wanted - first), options.first_seed + first)
    for scenario in SCENARIOS:
        for point in points.POINTS:
            yield "point", (scenario, point, times)
        for part in range(PLACES_IN_PARTS):
            yield "place", (scenario, one_in, part)
        yield "pair", (scenario, pairs, options.first_seed)


def work(kind: str, arguments: tuple) -> tuple[Counter, list[str]]:
    """One task: (counts, what is wrong)."""
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
            scenario, lambda place, frame: place % (one_in * PLACES_IN_PARTS) == one_in * part)
        return Counter({"places": tried}), wrong
    scenario, count, seed = arguments
    places, _, _ = interrupted.sweep(scenario, lambda place, frame: False)
    tried, wrong = interrupted.sweep_pairs(scenario, places, count, seed)
    return Counter({"pairs": tried}), wrong


def run(options: Options) -> Summary:
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    counts, wrong, left = Counter(), [], deque(tasks(options))
    running: deque[Future] = deque()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while running or left:
            late = deadline is not None and time.monotonic() > deadline
            while left and len(running) < 2 * options.jobs and not late:
                running.append(pool.submit(work, *left.popleft()))
            if not running:
                break
            counted, found = running.popleft().result()
            counts.update(counted)
            wrong += found
    short = [f"{len(left)} tasks were not begun"] if left else []
    short += [f"{name}: never failed" for name in points.POINTS if not counts[f"point {name}"]]
    return Summary(
        f"T4: {counts['runs']:,} runs with {counts['faults']:,} faults at {len(points.POINTS)} points in "
        f"{len(SCENARIOS)} scenarios, {counts['places']:,} places of an exception, {counts['pairs']:,} pairs of them, "
        f"{counts['processes']:,} processes from repeat {options.first_seed} on", wrong, short)
