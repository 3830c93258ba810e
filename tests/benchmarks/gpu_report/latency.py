"""Goal G7: variation of the time between tokens while requests arrive and their contexts are computed in chunks."""

from collections.abc import Iterator

import numpy as np

from batch_manager.tools.workload import Lengths, make_workload

from .bench import Bench
from .engines import engine
from .records import Record
from .shapes import LLAMA_1B, TINY

COUNT, RATE, CHUNK_TOKENS, MAX_BATCH = 160, 10.0, 512, 64
PROMPTS, OUTPUTS = Lengths(512, 0.8, 32, 2048), Lengths(128, 0.6, 16, 512)
SECONDS = 28            # estimate: the last request arrives after 16 s
DRY_LENGTHS = Lengths(4, 0.1, 3, 5)


def run(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    bench.require(SECONDS)
    workload = make_workload(
        count=bench.pick(COUNT, 2), rate=bench.pick(RATE, 1e3),
        vocab_size=bench.pick(LLAMA_1B, TINY).vocabulary, prompts=bench.pick(PROMPTS, DRY_LENGTHS),
        outputs=bench.pick(OUTPUTS, DRY_LENGTHS))
    with engine(bench, LLAMA_1B, max_batch=MAX_BATCH, max_num_tokens=CHUNK_TOKENS, graphs=graphs) as made:
        served = made.serve(workload["requests"], streaming=True)
    between = np.concatenate([np.diff(receipt.times) for receipt in served.receipts.values()])
    middle, late = np.percentile(between, 50), np.percentile(between, 99)
    first = [receipt.times[0] - request["arrival_s"] for request, receipt in zip(
        sorted(workload["requests"], key=lambda request: request["id"]),
        (served.receipts[number] for number in sorted(served.receipts)), strict=True)]
    case = f"{made.label}, 1B Llama, {RATE:g} requests a second, chunks of {CHUNK_TOKENS}"
    yield Record("G7", case, late * 1e3, middle * 1e3, "ms", note=made.note,
                 figures=f"first token p50 {np.percentile(first, 50) * 1e3:.1f} ms, p99 "
                         f"{np.percentile(first, 99) * 1e3:.1f} ms")
