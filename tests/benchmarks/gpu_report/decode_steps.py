"""Goals G3 and G3b: time of an engine's decode step, compared with the least time for its bytes and operations."""

from collections.abc import Iterator
from dataclasses import dataclass

from .bench import Bench
from .engines import engine
from .records import Record
from .shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, Shape


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement.

    batch     number of sequences
    context   mean number of tokens of a sequence during the measured steps
    seconds   estimated seconds of one measurement
    """

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """A model whose decode steps are measured.

    seconds     estimated seconds until an engine is warm, including the compilation of its kernels
    runs        number of measurements of each of `sizes`
    predicted   text with the predicted time of a step; empty: none
    """

    goal: str
    shape: Shape
    seconds: float
    sizes: tuple[Size, ...]
    runs: int
    predicted: str = ""


LARGE = Case("G3", LLAMA_8B, 35, (Size(32, 1024, 5), Size(256, 1024, 20)), runs=1)
SMALL = (Case("G3b-135M", LLAMA_135M, 20, (Size(256, 512, 2.5),), runs=2,
              predicted="predicted on an H200: 2.1 ms with graphs, 5 to 6 ms without"),
         Case("G3b-1B", LLAMA_1B, 12, (Size(1, 1024, 1),), runs=2))
STEPS = 200


def run_large(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    yield from _measured(bench, LARGE, graphs)


def run_small(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    for case in SMALL:
        yield from _measured(bench, case, graphs)


def _measured(bench: Bench, case: Case, graphs: bool) -> Iterator[Record]:
    bench.require(case.seconds + case.runs * case.sizes[0].seconds)
    most = max(size.batch for size in case.sizes)
    kv_tokens = max(size.batch * (size.context + 2 * STEPS) for size in case.sizes)
    with engine(bench, case.shape, max_batch=most, kv_tokens=kv_tokens, graphs=graphs) as made:
        for number, size in enumerate(case.sizes):
            if number:
                bench.require(case.runs * size.seconds)
            rows, tokens, steps = bench.pick((size.batch, size.context, STEPS), (min(size.batch, 2), 4, 1))
            times = [made.generate(rows, tokens, steps).step_seconds(rows)
                     for _ in range(bench.pick(case.runs, 1))]
            least = case.shape.least_step_seconds(bench, size.batch, size.context)
            yield Record(case.goal, f"{made.label}, {size.batch} of {size.context:,} tokens", least * 1e3,
                         min(times) * 1e3, "ms", max(times) / min(times) - 1 if len(times) > 1 else None,
                         note=made.note, figures=case.predicted)
