"""G3, G3b: the time of an engine's decode step, compared with the least time that its bytes and operations take."""

from collections.abc import Iterator

from ...errors import ConfigError
from .bench import Bench
from .engines import GRAPHS, engine, not_reached, refusal_of_graphs
from .records import Record
from .shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, Shape

# goal, model, (sequences, tokens of each sequence), seconds for loading and running
CASES: tuple[tuple[str, Shape, tuple[tuple[int, int], ...], float], ...] = (
    ("G3b-135M", LLAMA_135M, ((256, 512),), 8), ("G3b-1B", LLAMA_1B, ((1, 1024),), 8),
    ("G3", LLAMA_8B, ((32, 1024), (256, 1024)), 35))
STEPS, RUNS = 200, 2


def run(bench: Bench) -> Iterator[Record]:
    for label, graphs in GRAPHS:
        for goal, shape, sizes, seconds in CASES:
            if not bench.wants(goal.partition("-")[0]):
                continue
            bench.require(seconds)
            try:
                yield from _measured(bench, goal, shape, sizes, label, graphs)
            except ConfigError as error:
                if (reason := refusal_of_graphs(error, graphs)) is None:
                    raise
                yield not_reached(goal, label, reason)


def _measured(bench: Bench, goal: str, shape: Shape, sizes: tuple[tuple[int, int], ...], label: str,
              graphs: bool) -> Iterator[Record]:
    most = max(batch for batch, _ in sizes)
    kv_tokens = max(batch * (context + 2 * STEPS) for batch, context in sizes)
    with engine(bench, shape, max_batch=most, kv_tokens=kv_tokens, cuda_graphs=graphs) as made:
        for batch, context in sizes[: bench.pick(None, 1)]:
            rows, tokens, steps = bench.pick((batch, context, STEPS), (min(batch, 2), 4, 1))
            times = [made.generate(rows, tokens, steps).step_seconds(rows) for _ in range(bench.pick(RUNS, 1))]
            least = shape.least_step_seconds(bench, batch, context)
            yield Record(goal, f"{label}, {batch} of {context:,} tokens", least * 1e3, min(times) * 1e3, "ms",
                         max(times) / min(times) - 1)
