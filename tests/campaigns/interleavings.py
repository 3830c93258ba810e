"""T10: all schedules of the scenarios with few preemptions, random schedules, and real threads; see tests/interleaving.

ENOUGH has the most preemptions of a schedule in each tier. The limit is smaller where each line of the manager is a
yield point, because such schedules are much more numerous.
"""

import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.interleaving.explore import at_random, command, report, systematic
from tests.interleaving.scenarios import SCENARIOS

from .registry import Options, Summary

RANDOM_A_PORTION = 100
REPORTS = 5


@dataclass(frozen=True, slots=True)
class Enough:
    """The amount of work of a tier.

    preemptions            most preemptions of a schedule with yield points at locks, events, threads and callbacks
    preemptions_at_lines   most preemptions of a schedule in which each line of the manager is a yield point too
    random                 number of random schedules
    """

    preemptions: int
    preemptions_at_lines: int
    schedules: int
    random: int
    seconds_on_real_threads: float


ENOUGH = {"Q": Enough(1, 0, 2_000, 0, 5.0), "F": Enough(2, 1, 20_000, 5_000, 180.0),
          "C": Enough(2, 1, 20_000, 500_000, 600.0)}


@dataclass(slots=True)
class Counts:
    """The sums over some schedules.

    schedules     number of schedules that ran
    failed        reports of schedules with violations
    is_complete   False if the time limit ended the work
    """

    schedules: int = 0
    decisions: int = 0
    failed: list[str] = field(default_factory=list)
    is_complete: bool = True


def portion(name: str, preemptions: int | None, first_seed: int, deadline: float | None) -> Counts:
    """Run all schedules of the scenario `name` with at most `preemptions` preemptions.

    If `preemptions` is None, run RANDOM_A_PORTION random schedules instead, with seeds from `first_seed` on. Ends early
    at `deadline`, a time of `time.time()`.
    """
    counts = Counts()
    runs = (systematic(name, preemptions) if preemptions is not None
            else at_random(name, first_seed, RANDOM_A_PORTION))
    for done in runs:
        counts.schedules += 1
        counts.decisions += len(done.decisions)
        if done.violations:
            counts.failed.append(report(done) if not counts.failed else f"again: {command(done)}")
        if deadline is not None and time.time() > deadline:
            counts.is_complete = False
            break
    return counts


def run(options: Options) -> Summary:
    enough = ENOUGH[options.tier]
    deadline = None if options.seconds is None else time.time() + options.seconds
    systematic_counts, random_counts = Counts(), Counts()
    # Scenarios with two managers are the largest. Without a time limit, they run first, so that the processes end
    # together. Under a time limit, they run last.
    names = sorted(SCENARIOS, key=lambda name: ("managers" in name) == (options.seconds is None), reverse=True)
    calls, lines = [name for name in names if "/" not in name], [name for name in names if "/" in name]
    seeds = range(options.first_seed, options.first_seed + -(-enough.random // len(SCENARIOS)), RANDOM_A_PORTION)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(portion, name, enough.preemptions, 0, deadline): systematic_counts for name in calls}
        jobs |= {pool.submit(portion, name, enough.preemptions_at_lines, 0, deadline): systematic_counts
                 for name in lines}
        jobs |= {pool.submit(portion, name, None, seed, deadline): random_counts for name in SCENARIOS
                 for seed in seeds}
        for job in as_completed(jobs):
            total, counts = jobs[job], job.result()
            total.schedules += counts.schedules
            total.decisions += counts.decisions
            total.failed += counts.failed
            total.is_complete &= counts.is_complete

    seconds = enough.seconds_on_real_threads
    if options.seconds is not None:
        seconds = min(seconds, options.seconds)
    on_real_threads = subprocess.run([sys.executable, "-m", "tests.interleaving.real_threads", "--seconds",
                                      str(seconds)], capture_output=True, text=True)
    said = on_real_threads.stdout.splitlines()
    failures = systematic_counts.failed + random_counts.failed
    failures = failures[:REPORTS] + [text.splitlines()[-1] for text in failures[REPORTS:]]
    if on_real_threads.returncode:
        failures.append(on_real_threads.stdout + on_real_threads.stderr)

    return Summary(
        f"T10: {len(calls)} scenarios, {systematic_counts.schedules:,} schedules with {enough.preemptions} preemptions"
        f" ({enough.preemptions_at_lines} at lines of the manager), {random_counts.schedules:,} random ones from seed"
        f" {options.first_seed} on, {systematic_counts.decisions + random_counts.decisions:,} decisions; "
        f"{seconds:.0f} s on real threads: {said[0] if said else 'nothing'}; free-threaded Python: {free_threading()}",
        failures, short(systematic_counts, random_counts, enough))


def free_threading() -> str:
    """Say for the summary whether this interpreter is free-threaded, so that the real threads ran in parallel."""
    is_free = sysconfig.get_config_var("Py_GIL_DISABLED") and not sys._is_gil_enabled()
    return "this was one" if is_free else "skipped, this interpreter is not one"


def short(systematic_counts: Counts, random_counts: Counts, enough: Enough) -> list[str]:
    lines = []
    if not systematic_counts.is_complete:
        lines.append("not every schedule was run, the time was up")
    if systematic_counts.schedules < enough.schedules:
        lines.append(f"{systematic_counts.schedules:,} of {enough.schedules:,} schedules")
    if random_counts.schedules < enough.random:
        lines.append(f"{random_counts.schedules:,} of {enough.random:,} random schedules")
    return lines
