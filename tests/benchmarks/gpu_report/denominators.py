"""Measure the memory bandwidth and the matrix rate of this GPU. Several goals compare with these rates."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .bench import Bench
from .records import DRY, MEASURED, Record

BUFFER_BYTES = 2 << 30
MATRIX_SIZE = 8192
# name in Bench.rates -> case of the record, unit of the record, value of the unit
RATES = {
    "copy_bytes_s": ("copy, bytes read and bytes written", "GB/s", 1e9),
    "read_bytes_s": ("sum, bytes read", "GB/s", 1e9),
    "matmul_flop_s": (f"matrix product of {MATRIX_SIZE} x {MATRIX_SIZE}", "TFLOP/s", 1e12),
}


def rates_of(lines: Iterable[dict[str, Any]], device: str) -> dict[str, float]:
    """Return the rates in the lines of a report of the same device. Those of a dry run are 1.

    Raises ValueError if the report is one of another device, or a rate is missing or no number above 0.
    """
    measured = {line["case"]: line for line in lines if line["goal"] == "denominator"
                and line["status"] in (MEASURED, DRY)}
    for name, (case, _, _) in RATES.items():
        if case not in measured:
            raise ValueError(f"it has no {name}; expected a report that measured it")
        if measured[case]["device"] != device:
            raise ValueError(f"it is a report of {measured[case]['device']}; expected {device}")
        if measured[case]["status"] == MEASURED and not 0 < measured[case]["numerator"] < math.inf:
            raise ValueError(f"its {name} is {measured[case]['numerator']}; expected a finite number above 0")
    return {name: (measured[case]["numerator"] or 1.0) * unit for name, (case, _, unit) in RATES.items()}


def run(bench: Bench) -> Iterator[Record]:
    """Time a copy, a sum and a matrix product of random numbers, with more data than fits into the cache.

    """
    bench.require(6)
    bench.clock.warm()
    count = bench.pick(BUFFER_BYTES, 1024) // 4
    sources = [bench.normal(count, dtype=torch.float32) for _ in range(2)]
    target = torch.empty_like(sources[0])

    yield _measured(bench, "copy_bytes_s", 2.0 * target.nbytes,
                    lambda number: target.copy_(sources[number % 2]))
    yield _measured(bench, "read_bytes_s", float(target.nbytes), lambda number: sources[number % 2].sum())
    size = bench.pick(MATRIX_SIZE, 16)
    pairs = [(bench.normal(size, size), bench.normal(size, size)) for _ in range(2)]
    product = torch.empty_like(pairs[0][0])
    yield _measured(bench, "matmul_flop_s", 2.0 * size**3, lambda number: torch.mm(*pairs[number % 2], out=product))


def _measured(bench: Bench, name: str, amount: float, launch: Callable[[int], object]) -> Record:
    """Time a launch that handles `amount` bytes or operations, and keep the rate in `bench.rates`."""
    case, unit, value = RATES[name]
    timing = bench.clock.time(launch, launches=4)
    bench.rates[name] = amount / timing.median
    note = str(bench.dtype).removeprefix("torch.") if name == "matmul_flop_s" else ""
    return Record("denominator", case, bench.rates[name] / value, unit=unit, spread=timing.spread, note=note)
