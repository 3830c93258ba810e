"""G9: four workloads of TensorRT-LLM's published table. This engine runs them in bfloat16, and the table is for FP8.

The table is of version 1.0: Llama 3.1 8B in FP8 on one H200, `trtllm-bench throughput`, 1,500 to 30,000 requests of
equal lengths, all at once. This report serves only one full batch of requests, so that steps with a partial batch take
a larger share of its time.
"""

from collections.abc import Iterator

from .bench import Bench
from .engines import engine, equal_requests
from .records import Record
from .shapes import LLAMA_8B

BATCH = 256
# prompt, output, published output tokens/s, time limit in seconds
CELLS = ((128, 128, 27_911.0, 10.0), (2048, 128, 3_538.0, 60.0), (1000, 1000, 17_744.0, 60.0),
         (128, 2048, 26_221.0, 60.0))


def run(bench: Bench) -> Iterator[Record]:
    if not bench.wants("G9"):
        return
    bench.require(40)
    published, measured, cells = 0.0, 0.0, []
    with engine(bench, LLAMA_8B, max_batch=BATCH) as made:
        for prompt, output, rate, seconds in CELLS[: bench.pick(4, 1)]:
            if not bench.is_dry and bench.seconds_left < seconds / 2:
                break
            served = made.serve(equal_requests(made.shape, *bench.pick((BATCH, prompt, output), (2, 3, 3))))
            published += served.output_tokens / rate
            measured += served.seconds
            cells.append(f"{prompt}/{output}: {served.output_tokens / served.seconds:,.0f} tokens/s")
    if cells:
        yield Record("G9", f"{len(cells)} of 4 workloads, {BATCH} requests each", published, measured, "s",
                     judged=len(cells) == 4, figures="; ".join(cells),
                     note="" if len(cells) == 4 else f"no time was left for {4 - len(cells)} more")
