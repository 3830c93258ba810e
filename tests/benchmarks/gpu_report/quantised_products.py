"""quantised: time products with quantised weights beside the same products with plain weights.

The goal on an H100 and an H200 is one row at 0.80 of the copy bandwidth over the stored bytes, and 256 rows at 0.9 of
the plain product.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from batch_manager.triton_kernels.dispatch import kernel
from batch_manager.triton_kernels.reference.quantised_linear import decoded

from .bench import Bench
from .fused_products import MOST_WEIGHTS, WEIGHTS_BYTES
from .pages import relative_error
from .records import FAILED, Record

ROWS = (1, 16, 64, 256)
FORMATS = {"Q4_0": (4, 32, False), "Q8_0": (8, 32, False), "AWQ of 128": (4, 128, True), "int8 by row": (8, 0, False)}
SIZES = {"gate and up of 8B": (28672, 4096), "down of 0.6B": (1024, 3072)}         # outputs, inputs


def random_matrix(bench: Bench, outputs: int, inputs: int, bits: int, group: int, has_zeros: bool) -> tuple[Any, ...]:
    """Return arguments of `quantised_linear` after x: (levels, scales, zeros, bits, group)."""
    groups = -(-inputs // group) if group else 1
    zeros = bench.integers(0, 2**bits, outputs, groups, dtype=torch.int16) if has_zeros else 2 ** (bits - 1)
    scales = bench.normal(outputs, groups, dtype=torch.float16) / (2**bits * inputs**0.5)
    levels = bench.integers(0, 256, -(-inputs * bits // 256), outputs, 32, dtype=torch.uint8)
    return levels, scales, zeros, bits, group


def run(bench: Bench) -> Iterator[Record]:
    for size, (outputs, inputs) in bench.pick(SIZES, {"tiny": (20, 40)}).items():
        plain = [bench.normal(outputs, inputs) / inputs**0.5
                 for _ in range(bench.pick(_copies(outputs * inputs * bench.dtype.itemsize), 1))]
        for name, how in FORMATS.items():
            matrices = [random_matrix(bench, outputs, inputs, *how)
                        for _ in range(bench.pick(_copies(outputs * inputs * how[0] // 8), 1))]
            for rows in bench.pick(ROWS, (1,)):
                bench.require(0.4)
                yield _measured(bench, f"{size}, {name}, {rows} rows", plain, matrices, rows)
        bench.clock.forget()


def _copies(num_bytes: int) -> int:
    """Return how many matrices are used in turns, so that none is in the cache."""
    return max(2, min(MOST_WEIGHTS, -(-WEIGHTS_BYTES // num_bytes)))


def _measured(bench: Bench, case: str, plain: list[torch.Tensor], matrices: list[tuple[Any, ...]], rows: int) -> Record:
    x, linear, matrix = bench.normal(rows, plain[0].shape[1]), kernel("quantised_linear", bench.device), matrices[0]
    exact = functional.linear(x.float(), decoded(*matrix, x.shape[1]))
    if (error := relative_error(linear(x, *matrix), exact)) > bench.allowed_error:
        return Record("quantised", case, status=FAILED, note=f"the result is wrong: error {error:.2g}")
    theirs = bench.clock.time(lambda number: functional.linear(x, plain[number % len(plain)]))
    ours = bench.clock.time(lambda number: linear(x, *matrices[number % len(matrices)]))
    stored = sum(value.nbytes for value in matrix if isinstance(value, torch.Tensor))
    return Record("quantised", case, theirs.median * 1e6, ours.median * 1e6, "us", ours.spread,
                  figures=f"{stored / ours.median / 1e9:.0f} GB/s of {stored:,} stored bytes")
