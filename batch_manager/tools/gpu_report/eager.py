"""Repeat the measurements of engines with CUDA graphs turned off, to show how much the graphs gain.

A measurement is left out if graphs could be captured for none of its models. In this case, the first measurement
of these models already ran without graphs.
"""

from collections.abc import Callable, Iterator

from . import decode_steps, facts, headline, idle, latency, published_workloads
from .bench import Bench, OutOfTimeError
from .engines import EAGER, not_reached
from .records import FAILED, Record
from .shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, QWEN3_600M, Shape

# (goals as for --goal, goal of a record if no time is left, models, section)
PARTS: tuple[tuple[tuple[str, ...], str, tuple[Shape, ...], Callable[[Bench, bool], Iterator[Record]]], ...] = (
    (("G3b",), "G3b-135M", (LLAMA_135M, LLAMA_1B), decode_steps.run_small),
    (("G3",), "G3", (LLAMA_8B,), decode_steps.run_large),
    (("G4", "G8"), "G4", (LLAMA_135M,), idle.run),
    (("facts",), "fact", (LLAMA_135M,), facts.run),
    (("G7",), "G7", (LLAMA_1B,), latency.run),
    (("G6",), "G6", (QWEN3_600M,), headline.run),
    (("G9",), "G9", (LLAMA_8B,), published_workloads.run))


def run(bench: Bench) -> Iterator[Record]:
    for goals, goal, shapes, section in PARTS[: bench.pick(None, 1)]:
        if not bench.wants(*goals) or all(shape.name in bench.without_graphs for shape in shapes):
            continue
        try:
            yield from section(bench, False)
        except OutOfTimeError as error:
            yield not_reached(goal, f"{EAGER} engines", str(error))
        except Exception as error:
            yield Record(goal, f"{EAGER} engines", status=FAILED, note=f"{type(error).__name__}: {error}"[:300])
