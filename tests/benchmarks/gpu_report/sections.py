"""The sections of a report, in the order in which they run: the most useful first.

This table needs no torch, so that --help is quick; `functions` has the code. The engines of the sections with a budget
capture CUDA graphs. The sections without a budget run in the time that is left after all others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

START_SECONDS = 2.0          # estimate: the start of a section's process, and of its work on the GPU


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report, which runs in a process of its own.

    text      what the section measures
    seconds   time budget with the start of the process; 0: the time that all other sections leave
    goals     names of the goals that the section reports
    """

    name: str
    text: str
    seconds: float
    goals: tuple[str, ...] = ()


RATES, CORRECTNESS = "rates", "correctness"
EAGER = "-eager"             # end of the names of sections that run again without graphs

WITH_BUDGET = (
    Section(RATES, "rates of copying and reading memory, and of matrix products", 10, ("denominator",)),
    Section(CORRECTNESS, "every kernel against its oracle, by value", 35, ("correctness",)),
    Section("headline", "256 requests of 100 to 1,024 tokens, Qwen3-0.6B", 37, ("G6", "G6-share")),
    Section("profile", "a decode step by kernel: count, time and gaps; Qwen3-0.6B x 256", 24, ("profile",)),
    Section("sampling", "greedy, temperature, top-k and top-p against reading the logits", 10, ("sampling",)),
    Section("decode-split", "decode attention with several splits against copying", 20, ("decode-split",)),
    Section("decode-attention", "decode attention against copying", 30, ("G1", "G1-ragged", "G1b", "G1c")),
    Section("small-steps", "decode steps: 135M x 256, 1B x 1", 42, ("G3b-135M", "G3b-1B")),
    Section("large-steps", "decode steps: 8B x 32, 8B x 256", 65, ("G3",)),
    Section("idle", "idle time between steps; run-ahead against lockstep", 41, ("G4", "G4-share", "G8", "G8-overlap")),
    Section("latency", "time between tokens under random arrivals", 30, ("G7",)),
    Section("context-attention", "context attention against a matrix product", 26, ("G2", "G2b", "G2b-64")),
    Section("host-time", "host time of an iteration", 10, ("G5", "G5b")),
    Section("published", "TensorRT-LLM's published workloads", 30, ("G9",)),
)
WITHOUT_BUDGET = (
    Section("facts", "loading time, memory, hidden waits", 0, ("fact",)),
    Section("small-steps-eager", "without graphs", 0, ("G3b-135M", "G3b-1B")),
    Section("large-steps-eager", "without graphs", 0, ("G3",)),
    Section("headline-eager", "without graphs", 0, ("G6", "G6-share")),
    Section("idle-eager", "without graphs", 0, ("G4", "G4-share", "G8", "G8-overlap")),
    Section("latency-eager", "without graphs", 0, ("G7",)),
    Section("facts-eager", "without graphs", 0, ("fact",)),
    Section("published-eager", "without graphs", 0, ("G9",)),
    Section("fused-products", "products in one launch against separate launches", 0, ("G3-fused",)),
    Section("quantised-products", "products with quantised weights against plain ones", 0, ("quantised",)),
    Section("settings", "launch settings of kernels; the fastest as code", 0, ("settings",)),
    Section("transformers", "the headline workload with transformers, which computes every query against the keys of "
            "all sequences", 0, ("G6b",)),
)
SECTIONS = WITH_BUDGET + WITHOUT_BUDGET
# Sections that compare with the folder of peers.
WITH_PEERS = ("headline", "headline-eager", "decode-attention", "context-attention")


def functions() -> dict[str, Callable[[Any], Iterator[Any]]]:
    """Return name of a section -> the function (bench) that yields its records."""
    from . import (
        context_attention,
        correctness,
        decode_attention,
        decode_split,
        decode_steps,
        denominators,
        facts,
        fused_products,
        headline,
        host_time,
        idle,
        latency,
        published_workloads,
        quantised_products,
        sampling,
        settings,
        step_profile,
        transformers_peer,
    )
    from .shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, QWEN3_600M, Shape

    engines: dict[str, tuple[Callable[..., Iterator[Any]], tuple[Shape, ...]]] = {
        "headline": (headline.run, (QWEN3_600M,)), "small-steps": (decode_steps.run_small, (LLAMA_135M, LLAMA_1B)),
        "large-steps": (decode_steps.run_large, (LLAMA_8B,)), "idle": (idle.run, (LLAMA_135M,)),
        "latency": (latency.run, (LLAMA_1B,)), "published": (published_workloads.run, (LLAMA_8B,)),
        "facts": (facts.run, (LLAMA_135M,))}
    return {
        RATES: denominators.run, CORRECTNESS: correctness.run, "decode-attention": decode_attention.run,
        "context-attention": context_attention.run, "host-time": host_time.run, "profile": step_profile.run,
        "sampling": sampling.run, "decode-split": decode_split.run, "fused-products": fused_products.run,
        "quantised-products": quantised_products.run,
        "settings": settings.run, "transformers": transformers_peer.run,
        **{name: run for name, (run, _) in engines.items()},
        **{name + EAGER: partial(_without_graphs, run, shapes) for name, (run, shapes) in engines.items()}}


def _without_graphs(run: Callable[..., Iterator[Any]], shapes: Sequence[Any], bench: Any) -> Iterator[Any]:
    """Yield the records of engines without graphs, or none if graphs could be captured for no model of `shapes`.

    In this case, the section with graphs has already run without them.
    """
    from .engines import graphless

    if not all(graphless(bench, shape).exists() for shape in shapes):
        yield from run(bench, graphs=False)


def chosen(names: Sequence[str], *, has_rates: bool) -> list[Section]:
    """Return the sections of these names, or all sections without names, in the order in which they run.

    has_rates   whether the rates of the device are known; if not, other sections but correctness run after RATES
    """
    wanted = set(names) or {section.name for section in SECTIONS} - {RATES}
    if not has_rates and wanted != {CORRECTNESS}:
        wanted.add(RATES)
    return [section for section in SECTIONS if section.name in wanted]


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


def listed() -> str:
    """Return the sections as lines of a help text."""
    return "\n".join(f"  {one.name:<20}{f'{one.seconds:.0f} s' if one.seconds else 'what is left':>13}  {one.text}"
                     for one in SECTIONS)
