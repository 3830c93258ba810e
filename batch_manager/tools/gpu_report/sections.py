"""The sections of a report, in the order in which they run, with their shares of the time.

Prerequisites come first, followed by the most informative sections. Unused time goes to the later sections.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import (
    context_attention,
    correctness,
    decode_attention,
    decode_steps,
    denominators,
    facts,
    fused_products,
    headline,
    host_time,
    idle,
    latency,
    published_workloads,
)
from .bench import Bench
from .records import Record


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report.

    seconds   weight of the section's share of the time, about its seconds in a report of eight minutes
    goals     goals that the section measures; empty: the section always runs
    """

    name: str
    run: Callable[[Bench], Iterator[Record]]
    seconds: float
    goals: tuple[str, ...] = ()


SECTIONS = (
    Section("correctness", correctness.run, 60),
    Section("denominators", denominators.run, 20),
    Section("decode attention", decode_attention.run, 45, ("G1", "G1b", "G1c")),
    Section("context attention", context_attention.run, 35, ("G2", "G2b")),
    Section("decode steps", decode_steps.run, 85, ("G3", "G3b")),
    Section("fused products", fused_products.run, 30, ("G3",)),
    Section("idle time", idle.run, 50, ("G4", "G8")),
    Section("headline workload", headline.run, 80, ("G6", "G6b")),
    Section("latency", latency.run, 35, ("G7",)),
    Section("host time", host_time.run, 10, ("G5", "G5b")),
    Section("facts", facts.run, 20),
    Section("published workloads", published_workloads.run, 40, ("G9",)),
)
SECONDS = sum(section.seconds for section in SECTIONS)
