"""Measure the loading time and the memory of an engine, and check that it has no hidden waits for the device."""

from collections.abc import Iterator

from ...errors import ConfigError
from ..bench.errors import BenchmarkError
from .bench import Bench
from .engines import GRAPHS, engine, not_reached, refusal_of_graphs
from .records import Record
from .shapes import LLAMA_135M

BATCH, CONTEXT, STEPS = 64, 256, 20


def run(bench: Bench) -> Iterator[Record]:
    for label, graphs in GRAPHS:
        bench.require(10)
        try:
            yield from _facts(bench, label, graphs)
        except ConfigError as error:
            if (reason := refusal_of_graphs(error, graphs)) is None:
                raise
            yield not_reached("fact", f"{label}: loading", reason)


def _facts(bench: Bench, label: str, graphs: bool) -> Iterator[Record]:
    batch, context, steps = bench.pick((BATCH, CONTEXT, STEPS), (2, 4, 1))
    with engine(bench, LLAMA_135M, max_batch=BATCH, kv_tokens=BATCH * 2 * CONTEXT, cuda_graphs=graphs) as made:
        yield Record("fact", f"{label}: seconds until a 135M Llama serves, including graph capture and warm-up",
                     made.load_seconds, unit="s")
        served = made.generate(batch, context, steps)
        yield Record("fact", f"{label}: memory on the GPU, including weights and cache",
                     served.stamps[-1].gpu_bytes / 2**20, unit="MiB")
        try:
            with bench.clock.refusing_hidden_waits():
                made.generate(batch, context, steps)
        except BenchmarkError as error:
            yield Record("fact", f"{label}: requests without hidden waits for the device", 0.0, unit="of 1",
                         note=str(error)[:300])
        else:
            yield Record("fact", f"{label}: requests without hidden waits for the device", 1.0, unit="of 1")
