"""Runs schedules of a scenario: all schedules with few preemptions (as CHESS does), or random ones.

A switch away from a task that can run costs a preemption, and so do an advance of the clock and an interrupt. A switch
from a task that waits or has ended costs none. Schedules form a tree: each child changes one decision of its parent,
after the last decision that the parent changed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from .doubles import installed
from .scenarios import SCENARIOS
from .scheduler import CLOCK, INTERRUPT, Decision, Scheduler
from .world import run_once

Schedule = dict[int, str]


@dataclass(slots=True)
class Run:
    """A finished run.

    schedule   the schedule that repeats the run
    log        every yield point, if `run` was called with `with_log=True`
    """

    scenario: str
    schedule: Schedule
    decisions: list[Decision]
    violations: list[str]
    log: list[str] = field(default_factory=list)


def run(name: str, schedule: Schedule | None = None, random: Random | None = None, *, with_log: bool = False) -> Run:
    """Run the scenario `name` once, with a schedule or with random choices."""
    scenario = SCENARIOS[name]
    scheduler = Scheduler(schedule, random, scenario.watched_files)
    if with_log:
        scheduler.log = []
    with installed(scheduler) as threading:
        violations = run_once(scenario.body, scheduler, threading)
    return Run(name, scheduler.schedule, scheduler.decisions, violations, scheduler.log or [])


def cost(decision: Decision, choice: str) -> int:
    """Return the number of preemptions that `choice` costs at a decision: 0 or 1."""
    if choice == decision.options[0]:
        return 0
    return int(decision.is_preempting or choice in (CLOCK, INTERRUPT))


def below(schedule: Schedule, decisions: list[Decision], preemptions: int) -> Iterator[tuple[Schedule, int]]:
    """Yield (child, preemptions left) for each child of a run's schedule that costs at most `preemptions` more.

    decisions   the decisions of the run, which has finished
    """
    for number in range(max(schedule, default=-1) + 1, len(decisions)):
        decision = decisions[number]
        for choice in decision.options[1:]:
            left = preemptions - cost(decision, choice)
            if left >= 0:
                yield {**schedule, number: choice}, left


def systematic(name: str, preemptions: int, wanted: Callable[[], bool] = lambda: True) -> Iterator[Run]:
    """Run every schedule with at most `preemptions` preemptions, those with the fewest first, while `wanted()`."""
    waiting: list[deque[Schedule]] = [deque() for _ in range(preemptions + 1)]    # by the preemptions left
    waiting[preemptions].append({})
    for left in range(preemptions, -1, -1):
        while waiting[left] and wanted():
            schedule = waiting[left].popleft()
            done = run(name, schedule)
            yield done
            for child, left_of_child in below(schedule, done.decisions, left):
                waiting[left_of_child].append(child)


def at_random(name: str, first_seed: int, count: int) -> Iterator[Run]:
    for seed in range(first_seed, first_seed + count):
        yield run(name, random=Random(f"{name} {seed}"))


def to_text(schedule: Schedule) -> str:
    return ",".join(f"{number}:{choice}" for number, choice in sorted(schedule.items()))


def from_text(text: str) -> Schedule:
    return {int(number): choice for number, _, choice in (part.partition(":") for part in text.split(",") if part)}


def command(done: Run) -> str:
    """Return the command that repeats a run."""
    return f"python -m tests.interleaving.replay {done.scenario} '{to_text(done.schedule)}'"


def report(done: Run) -> str:
    return "\n".join([f"{done.scenario}:", *(f"  {violation}" for violation in done.violations),
                      f"again: {command(done)}"])
