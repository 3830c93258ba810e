"""Runs small kernels in Triton's interpreter and prints the results and the errors, as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_samples

The kernels mix types and shapes, and some of them are wrong. test_quick_interpreter.py runs this program with and
without tests/quick_interpreter.py.
"""

import json
import sys

import torch
import triton
import triton.language as tl

TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
         torch.float64)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32)
FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SELECTED = (torch.bool, torch.int32, torch.float16, torch.bfloat16, torch.float32)
INT32_MAX, UINT8_MAX = 2**31 - 1, 255


@triton.jit
def _arithmetic(first_ptr, second_ptr, out_ptr, SIZE: tl.constexpr):
    """A row, a column, scalars and constants, added, multiplied, compared and selected in their common types."""
    lane = tl.arange(0, SIZE)
    first, second = tl.load(first_ptr + lane), tl.load(second_ptr + lane)
    table = first[:, None] * second[None, :]
    scalar = tl.load(second_ptr + 1)
    mixed = tl.where(table > scalar, table + 1, first[:, None] + 0 * table)
    out = mixed.to(tl.float32) + tl.sum(mixed.to(tl.float32), 1)[:, None] - tl.max(table.to(tl.float32), 0)[None, :]
    tl.store(out_ptr + lane[:, None] * SIZE + lane[None, :], out)


@triton.jit
def _pointers(numbers_ptr, out_ptr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Addresses in steps of different types, masks, casts of bits, and a loop that carries tensors."""
    lane = tl.arange(0, SIZE)
    total, row = tl.zeros([SIZE], tl.float32), tl.full((), 0, tl.int64)
    for step in range(3):
        addresses = numbers_ptr + row + lane
        part = tl.load(addresses, mask=lane < SIZE - step, other=2.5)
        total += part
        row += SIZE
    bits = total.to(BITS, bitcast=True) & 0xFFFF0000
    tl.store(out_ptr + lane, bits.to(tl.float32, bitcast=True))
    tl.store(out_ptr + SIZE + lane, tl.trans(tl.dot(total[:, None] * total[None, :], tl.zeros([SIZE, SIZE], tl.float32)
                                                    + lane[None, :])).to(tl.float16).to(tl.float32).sum(0))


@triton.jit
def _of_integers(first_ptr, second_ptr, out_ptr, SIZE: tl.constexpr):
    """Quotients, bits and comparisons of rows, scalars and constants."""
    lane = tl.arange(0, SIZE)
    first, second = tl.load(first_ptr + lane), tl.load(second_ptr + lane)
    scalar = tl.load(second_ptr + 1)
    bits = (first << 1) ^ (first >> 1) | (5 & second) ^ (scalar | 8) ^ (second * 3 - second)
    is_wanted = (first < second) & (first >= 2) | (scalar == first) ^ (second != 3) & (scalar <= 4)
    out = tl.where(is_wanted, first // (second + 1) + 100 * (first % (scalar + 1)), bits)
    tl.store(out_ptr + lane, out.to(tl.float32))


@triton.jit
def _of_fractions(first_ptr, second_ptr, out_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    first, second = tl.load(first_ptr + lane), tl.load(second_ptr + lane)
    scalar = tl.load(second_ptr + 1)
    out = (first - second) / (1.5 + second * second) + (2 - first) * scalar - 0.1 / (first * -0.0 + scalar)
    out = tl.where((first > scalar) | (out <= 0.25), out, 1 / (first * -0.0)) % 3.5
    tl.store(out_ptr + lane, out.to(tl.float32))


@triton.jit
def _selected(first_ptr, second_ptr, out_ptr, SIZE: tl.constexpr):
    """Loads with and without masks, and functions of operands of different types, shapes, or without a shape."""
    lane = tl.arange(0, SIZE)
    first, table = tl.load(first_ptr + lane), tl.load(first_ptr + lane[:, None] * 0 + lane, lane < SIZE - 3, 2)
    second = tl.load(second_ptr + lane, mask=lane > 2, other=-float("inf"), cache_modifier=".cg")
    scalar, other = tl.load(second_ptr + 1), tl.load(second_ptr + lane, lane < 4, other=first)
    table = tl.where((first < scalar)[:, None], table, tl.maximum(second[None, :], -3)) + tl.minimum(first, 2)
    wide, row = table.to(tl.float32), other.to(tl.float32)
    wide = tl.fma(wide, row, tl.exp2(row[:, None] - tl.log2(tl.maximum(row, 0.5)))) + tl.fma(row, -0.5, row)
    tl.store(out_ptr + lane[:, None] * SIZE + lane, tl.where(wide > tl.maximum(scalar, 1), wide, -0.0))


@triton.jit
def _add(numbers_ptr, out_ptr, more, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out_ptr + lane, tl.load(numbers_ptr + lane) + more)


@triton.jit
def _multiply(numbers_ptr, out_ptr, more, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out_ptr + lane, tl.load(numbers_ptr + lane) * tl.load(numbers_ptr + lane))


@triton.jit
def _of_two_shapes(numbers_ptr, out_ptr, more, SIZE: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


def results():
    """Yield (name, outcome) of each kernel. An outcome is a list of numbers or the text of an error.

    Everything runs twice, with other numbers.
    """
    draw = torch.Generator().manual_seed(3)
    for time in ("first", "second"):
        for kernel, types, size in ((_arithmetic, TYPES, 64), (_of_integers, INTEGERS, 8),
                                    (_of_fractions, FRACTIONS, 8), (_selected, SELECTED, 64)):
            for first in types:
                for second in types:
                    given = [torch.randint(0, 2 if type is torch.bool else 7, (8,), generator=draw).to(type)
                             for type in (first, second)]
                    out = torch.zeros(size)
                    yield (f"{time} {kernel.__name__} {first} {second}",
                           attempt(kernel, *given, out, SIZE=8) or out.tolist())
        for bits in (tl.int32, tl.uint32):
            out = torch.zeros(32)
            numbers = torch.randn(48, generator=draw)
            yield f"{time} pointers {bits}", attempt(_pointers, numbers, out, SIZE=16, BITS=bits) or out.tolist()
        for kernel in (_add, _multiply, _of_two_shapes):
            for type, number, more in ((torch.int32, INT32_MAX, 1), (torch.int32, -INT32_MAX, -1),
                                       (torch.int32, 46340, 0), (torch.int32, 46341, 2), (torch.uint8, UINT8_MAX, 1),
                                       (torch.int64, 2**62, 5), (torch.uint32, 2**32 - 1, 1),
                                       (torch.int16, 2**15 - 1, 1), (torch.int32, 7, -9)):
                for size in (8, 12):
                    numbers = torch.full((size,), number).to(type)
                    out = torch.zeros(size, dtype=type)
                    yield (f"{time} {kernel.__name__} {type} {number} {more} {size}",
                           attempt(kernel, numbers, out, more, SIZE=size) or out.tolist())


def attempt(kernel, *given, **constants):
    """Launch a kernel. Return the text of its error, or None."""
    try:
        kernel[(1,)](*given, **constants)
    except Exception as error:
        return f"{type(error).__name__}: {error}; {error.__cause__}"
    return None


if __name__ == "__main__":
    json.dump(dict(results()), sys.stdout)
