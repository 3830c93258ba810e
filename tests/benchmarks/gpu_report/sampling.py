"""Time of sampling the tokens of a step, compared with the time of reading its logits once."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from batch_manager.triton_kernels.sample_token import sample_token

from .bench import Bench
from .records import Record

SIZES = ((256, 151_936), (256, 49_152), (32, 128_256), (1, 128_256))           # rows, vocabulary
KINDS = (("greedy", 0.0, 0, 0.0), ("temperature 0.8", 0.8, 0, 0.0), ("top-k 40", 0.8, 40, 0.0),
         ("top-p 0.9", 0.8, 0, 0.9))                                          # name, temperature, top-k, top-p
SECONDS = 2.0            # estimate for all kinds of one size, including the compilation of the kernels
Launch = Callable[[int], object]


def run(bench: Bench) -> Iterator[Record]:
    for rows, vocabulary in bench.pick(SIZES, ((2, 50),)):
        bench.require(bench.pick(SECONDS, len(SIZES) * SECONDS))
        logits = [3 * bench.normal(rows, vocabulary) for _ in range(2)]
        least = logits[0].nbytes / bench.read_bytes_s
        for kind, *values in KINDS:
            timing = bench.clock.time(_launch(bench, logits, values, only_greedy=kind == "greedy"))
            yield Record("sampling", f"{rows} rows of {vocabulary:,} logits, {kind}", least * 1e6,
                         timing.median * 1e6, "us", timing.spread)


def _launch(bench: Bench, logits: list[torch.Tensor], values: list[float], *, only_greedy: bool) -> Launch:
    """Return a function (number) that samples a token for each row.

    values   temperature, top-k and top-p of all rows
    """
    rows = len(logits[0])
    given = [bench.tensor(np.full(rows, value), dtype) for value, dtype in
             zip(values, (torch.float32, torch.int32, torch.float32), strict=True)]
    given += [bench.integers(0, 2**31, rows, dtype=torch.int64), bench.integers(0, 4096, rows)]     # seeds, positions
    return lambda number: sample_token(logits[number % len(logits)], *given, only_greedy=only_greedy)
