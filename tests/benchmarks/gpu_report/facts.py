"""Measure the loading time and the memory of an engine, and check that it has no hidden waits for the device."""

from collections.abc import Iterator

from batch_manager.tools.bench.errors import BenchmarkError

from .bench import Bench
from .engines import engine
from .records import Record
from .shapes import LLAMA_135M

BATCH, CONTEXT, STEPS = 64, 256, 20
SECONDS = 10            # estimate


def run(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    bench.require(SECONDS)
    batch, context, steps = bench.pick((BATCH, CONTEXT, STEPS), (2, 4, 1))
    with engine(bench, LLAMA_135M, max_batch=BATCH, kv_tokens=BATCH * 2 * CONTEXT, graphs=graphs) as made:
        label = made.label
        yield Record("fact", f"{label}: captured graphs", made.client.stamps[-1].graphs, note=made.note)
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
