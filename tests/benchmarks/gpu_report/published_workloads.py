"""Goal G9: four workloads of TensorRT-LLM's published throughput table, which is for FP8.

This engine runs them in bfloat16.

The table is of version 1.0: Llama 3.1 8B in FP8 on one H200, `trtllm-bench throughput`, 1,500 to 30,000 requests of
equal lengths, all at once. This report serves only one full batch of requests for each workload. Steps with a
partial batch therefore take a larger share of the time than in the runs of the table.
"""

from collections.abc import Iterator

from .bench import Bench
from .engines import engine, equal_requests, joined
from .records import Record
from .shapes import LLAMA_8B

BATCH, LOAD_SECONDS = 256, 15
# prompt, output, published output tokens/s, estimated seconds. The estimates are for a GPU of 80 GB: 256 sequences of
# 2,000 tokens do not fit into its KV cache at once.
CELLS = ((128, 128, 27_911.0, 4.0), (2048, 128, 3_538.0, 26.0), (1000, 1000, 17_744.0, 34.0),
         (128, 2048, 26_221.0, 45.0))


def run(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    bench.require(LOAD_SECONDS + CELLS[0][3])
    published, measured, cells = 0.0, 0.0, []
    with engine(bench, LLAMA_8B, max_batch=BATCH, graphs=graphs) as made:
        for number, (prompt, output, rate, seconds) in enumerate(CELLS):
            if number and not bench.has_time(seconds):
                break
            served = made.serve(equal_requests(made.shape, *bench.pick((BATCH, prompt, output), (2, 3, 2))))
            published += served.output_tokens / rate
            measured += served.seconds
            cells.append(f"{prompt}/{output}: {served.output_tokens / served.seconds:,.0f} tokens/s")
    num_left = len(CELLS) - len(cells)
    yield Record("G9", f"{made.label}, {len(cells)} of {len(CELLS)} workloads, {BATCH} requests each", published,
                 measured, "s", judged=not num_left, figures="; ".join(cells),
                 note=joined(made.note, f"no time was left for {num_left} more" if num_left else ""))
