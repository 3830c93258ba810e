"""The sections of a report, in the order in which they run, with their time budgets.

Prerequisites come first, followed by the sections that measure the goals. The engines in all these sections capture
CUDA graphs. The sections at the end have no budget: they run in the time that is left when every goal has its figure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from . import (
    context_attention,
    correctness,
    decode_attention,
    decode_steps,
    denominators,
    eager,
    facts,
    fused_products,
    headline,
    host_time,
    idle,
    latency,
    published_workloads,
    settings,
)
from .bench import Bench
from .goals import GOALS, family
from .records import Record

SETTINGS, FACTS = "settings", "facts"        # names for --goal, besides the goals


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report.

    seconds    time budget; 0: the section runs after all sections with a budget, in the time that is left
    goals      what the section measures: names of goals, SETTINGS or FACTS, as for --goal
    needed_by  further goals whose measurement needs the section; it also runs for these goals
    """

    name: str
    run: Callable[[Bench], Iterator[Record]]
    seconds: float
    goals: tuple[str, ...] = ()
    needed_by: tuple[str, ...] = ()

    def runs_for(self, bench: Bench) -> bool:
        return bench.wants(*self.goals, *self.needed_by)


FAMILIES = tuple(sorted({family(name) for name in GOALS} - {SETTINGS}))
SECTIONS = (
    Section("denominators", denominators.run, 10, needed_by=(*FAMILIES, SETTINGS)),
    Section("correctness", correctness.run, 60, needed_by=FAMILIES),
    Section("decode attention", decode_attention.run, 30, ("G1", "G1b", "G1c")),
    Section("context attention", context_attention.run, 25, ("G2", "G2b")),
    Section("8B decode steps", decode_steps.run_large, 70, ("G3",)),
    Section("small decode steps", decode_steps.run_small, 42, ("G3b",)),
    Section("idle time", idle.run, 50, ("G4", "G8")),
    Section("headline workload", headline.run, 85, ("G6", "G6b")),
    Section("latency", latency.run, 30, ("G7",)),
    Section("host time", host_time.run, 8, ("G5", "G5b")),
    Section("published workloads", published_workloads.run, 50, ("G9",)),
    Section("facts", facts.run, 0, (FACTS,)),
    Section("eager engines", eager.run, 0, ("G3", "G3b", "G4", "G6", "G7", "G8", "G9", FACTS)),
    Section("fused products", fused_products.run, 0, ("G3",)),
    Section("settings", settings.run, 0, (SETTINGS,)),
)


def plan(sections: Sequence[Section], minutes: float) -> dict[str, tuple[float, float]]:
    """Return name of a section -> (its budget in seconds, its latest end in seconds from the start of the report).

    A section may use its budget and the time that the sections before it left. Its latest end leaves all later sections
    their budgets. If the budgets exceed `minutes`, the sections run in order with whole budgets until the time is over,
    because a section measures nothing in a part of its budget.
    """
    ends, earlier, later = {}, 0.0, sum(section.seconds for section in sections)
    for section in sections:
        earlier, later = earlier + section.seconds, later - section.seconds
        ends[section.name] = (section.seconds, max(60 * minutes - later, min(60 * minutes, earlier)))
    return ends
