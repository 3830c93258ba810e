"""Measure the memory bandwidth and the matrix rate of this GPU. Several goals compare with these rates."""

from collections.abc import Iterator

import torch

from .bench import Bench
from .records import Record

BUFFER_BYTES = 2 << 30
MATRIX_SIZE = 8192


def run(bench: Bench) -> Iterator[Record]:
    """Time a copy, a sum and a matrix product of random numbers, with more data than fits into the cache."""
    bench.require(6)
    bench.clock.warm()
    count = bench.pick(BUFFER_BYTES, 1024) // 4
    sources = [bench.normal(count, dtype=torch.float32) for _ in range(2)]
    target = torch.empty_like(sources[0])

    timing = bench.clock.time(lambda number: target.copy_(sources[number % 2]), launches=4)
    bench.copy_bytes_s = 2 * target.nbytes / timing.median
    yield Record("denominator", "copy, bytes read and bytes written", bench.copy_bytes_s / 1e9, unit="GB/s",
                 spread=timing.spread)

    timing = bench.clock.time(lambda number: sources[number % 2].sum(), launches=4)
    bench.read_bytes_s = target.nbytes / timing.median
    yield Record("denominator", "sum, bytes read", bench.read_bytes_s / 1e9, unit="GB/s", spread=timing.spread)

    size = bench.pick(MATRIX_SIZE, 16)
    pairs = [(bench.normal(size, size), bench.normal(size, size)) for _ in range(2)]
    product = torch.empty_like(pairs[0][0])
    timing = bench.clock.time(lambda number: torch.mm(*pairs[number % 2], out=product), launches=4)
    bench.matmul_flop_s = 2.0 * size**3 / timing.median
    yield Record("denominator", f"matrix product of {MATRIX_SIZE} x {MATRIX_SIZE} in bfloat16",
                 bench.matmul_flop_s / 1e12, unit="TFLOP/s", spread=timing.spread)
