"""A linear layer over a matrix of quantised levels, which stay as they are in memory.

    W[n, k]  = (level[n, k] - zero point[n, group of k]) * scale[n, group of k]
    out      = factor * (x W^T) + bias              without a residual
    residual = residual + factor * (x W^T) + bias   with one, in place, rounded once

Shapes      x           [T, K]   T rows of K inputs in float32, float16 or bfloat16; contiguous rows, any row stride
            levels      [chunks, N, 32] uint8   of N outputs. 8 bits: byte b of chunk c is the level of input 32 c + b.
                        4 bits: its lower half is that of input 64 c + b, its upper half that of input 64 c + 32 + b
            scales      [N, groups] float32, float16 or bfloat16
            zeros       [N, groups] int16, or one number for all. A level and its zero point differ by at most 256
            bits        4 or 8
            group       inputs of a group: 32 times a power of two; 0: all inputs are one group
            bias        [N] or None
            residual    [T, N]   contiguous rows; None: no residual
            out         [T, N]   None: allocated
Mutates     residual, or else out. Neither may share memory with x.
Returns     the mutated tensor.
Oracle      triton_kernels/reference/quantised_linear.py
Source      tiled matrix product with weights as the first operand; written for this project.

Nothing of a weight is rounded: a level less its zero point is a whole number of at most 9 bits, which all dtypes of x
hold. The matrix units multiply these numbers with x and add in float32. The scale of a group multiplies its sum, in
float32. A matrix that is one group is scaled once, after the last input.

The bits of 2^23 + level are those of 2^23 with the level in the last places. So one bit operation and one subtraction
of 2^23 + zero point make a number from a level; conversions of integers take up to four times as long.

The compiler loads levels and x several steps ahead. It does not do so for what multiplies the sums, so each step
requests the scales of the next one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .device_limits import DeviceLimits, device_limits

CHUNK_BYTES = 32                    # of an output, in the memory of levels
BASE = 2.0**23
FEW_ROWS, SOME_ROWS = 16, 64        # rows of x up to which they are one tile of this size
COLUMNS = (64, 32, 16)              # outputs of a program for few rows, in order of preference
WAVES = 2                           # least number of programs per multiprocessor to give a program more outputs
STEP_INPUTS = 128                   # inputs of a step for few rows
MOST_STAGES = 5                     # steps in flight, including the one in use
MOST_SHARED_BYTES = 100 * 1024      # per program, so that two fit on a multiprocessor


@triton.jit
def _numbers(levels, subtracted, dtype: tl.constexpr):
    """Return levels, as integers, less their zero points, in `dtype`. `subtracted` is 2^23 + zero point."""
    return ((levels | 0x4B000000).to(tl.float32, bitcast=True) - subtracted).to(dtype)


@triton.jit
def _of_group(values, INDEX: tl.constexpr, GROUPS: tl.constexpr):
    """Return column INDEX of values [COLUMNS, GROUPS], as [COLUMNS, 1]."""
    if GROUPS == 1:
        return values
    else:
        return tl.sum(tl.where(tl.arange(0, GROUPS)[None, :] == INDEX, values, 0.0), 1)[:, None]


# Sizes of matrices are arguments, so that all matrices of a model share a compiled kernel.
@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_groups"])
def _quantised_linear_kernel(
    x_ptr, levels_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,
    zero, factor,
    num_rows, K, N, num_chunks, num_groups, x_stride_t, out_stride_t,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr,           # chunks of a step
    BITS: tl.constexpr, GROUP: tl.constexpr,              # inputs of a group; 0: all
    CHUNK_BYTES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    PER_BYTE: tl.constexpr = 8 // BITS
    STEP: tl.constexpr = CHUNKS * CHUNK_BYTES * PER_BYTE                     # inputs
    GROUPS: tl.constexpr = STEP // GROUP if 0 < GROUP < STEP else 1          # of a step
    BLOCKS: tl.constexpr = CHUNKS * PER_BYTE // GROUPS                       # of a step that have the same scale

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)    # neighboring programs share a tile of the levels
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, column_inside = row < num_rows, column < N
    byte, of_step = tl.arange(0, CHUNK_BYTES), tl.arange(0, GROUPS)
    x_row_ptr = x_ptr + row.to(tl.int64)[None, :] * x_stride_t               # x arrives transposed
    level_ptr = levels_ptr + column.to(tl.int64)[:, None] * CHUNK_BYTES + byte[None, :]
    chunk_stride = tl.full([], N, tl.int64) * CHUNK_BYTES
    group_offset = column.to(tl.int64)[:, None] * num_groups + of_step[None, :]
    out_tile_ptr = out_ptr + row.to(tl.int64)[None, :] * out_stride_t + column[:, None]
    out_inside = row_inside[None, :] & column_inside[:, None]
    group_inside = column_inside[:, None] & (of_step < num_groups)[None, :]

    # Loaded early, used at the end.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_inside, other=0.0).to(tl.float32)
    if ADDS and ROWS <= 64:                               # a larger tile takes too many registers
        residual = tl.load(out_tile_ptr, mask=out_inside, other=0.0)

    next_scales = tl.load(scales_ptr + group_offset, mask=group_inside, other=0.0)
    if HAS_ZEROS:
        next_zeros = tl.load(zeros_ptr + group_offset, mask=group_inside, other=0)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.range(0, tl.cdiv(num_chunks, CHUNKS), num_stages=STAGES):
        if HAS_ZEROS:
            zeros = next_zeros.to(tl.float32) + 8388608.0
        if GROUP > 0:
            scales = next_scales.to(tl.float32)
            if GROUPS > 1:
                group = (step + 1) * GROUPS
            else:
                group = (step + 1) * STEP // GROUP
            group_inside = column_inside[:, None] & (group + of_step < num_groups)[None, :]
            next_scales = tl.load(scales_ptr + group_offset + group, mask=group_inside, other=0.0)
            if HAS_ZEROS:
                next_zeros = tl.load(zeros_ptr + group_offset + group, mask=group_inside, other=0)
        for block in tl.static_range(CHUNKS * PER_BYTE):                     # of CHUNK_BYTES inputs
            if block % PER_BYTE == 0:
                chunk = step * CHUNKS + block // PER_BYTE
                chunk_inside = chunk * CHUNK_BYTES + byte < num_chunks * CHUNK_BYTES
                levels = tl.load(level_ptr + chunk * chunk_stride, mask=column_inside[:, None] & chunk_inside[None, :],
                                 other=0).to(tl.int32)
            inner = step * STEP + block * CHUNK_BYTES + byte
            x = tl.load(x_row_ptr + inner[:, None], mask=row_inside[None, :] & (inner < K)[:, None], other=0.0)
            if HAS_ZEROS:
                subtracted = _of_group(zeros, block * GROUPS // (CHUNKS * PER_BYTE), GROUPS)
            else:
                subtracted = zero + 8388608.0
            if BITS == 8:
                numbers = _numbers(levels, subtracted, dtype)
            elif block % PER_BYTE == 0:
                numbers = _numbers(levels & 15, subtracted, dtype)
            else:
                numbers = _numbers(levels >> 4, subtracted, dtype)
            if GROUP == 0:
                total = tl.dot(numbers, x, total, input_precision="ieee")
            else:
                if block % BLOCKS == 0:
                    product = tl.dot(numbers, x, input_precision="ieee")
                else:
                    product = tl.dot(numbers, x, product, input_precision="ieee")
                if block % BLOCKS == BLOCKS - 1:
                    total += product * _of_group(scales, block * GROUPS // (CHUNKS * PER_BYTE), GROUPS)

    if GROUP == 0:
        total *= next_scales.to(tl.float32)
    total *= factor
    if HAS_BIAS:
        total += bias[:, None]
    if ADDS:
        if ROWS > 64:
            residual = tl.load(out_tile_ptr, mask=out_inside, other=0.0)
        total += residual.to(tl.float32)
    tl.store(out_tile_ptr, total.to(out_ptr.dtype.element_ty), mask=out_inside)


class QuantisedLinearSettings(NamedTuple):
    """Launch settings: rows of x and outputs of a program, chunks of a step, warps, steps in flight."""

    rows: int
    columns: int
    chunks: int
    num_warps: int
    num_stages: int


def quantised_linear_settings(num_rows, out_size, bits, element_size_bytes, limits: DeviceLimits
                              ) -> QuantisedLinearSettings:
    """Return the launch settings. They are estimates that have not been timed on a GPU.

    Up to FEW_ROWS rows, a product takes as long as reading the levels: programs have few outputs, so that there are
    enough of them, and load several chunks in a step. With more rows, a program makes numbers of its levels for as many
    rows as fit into its registers.
    """
    if num_rows <= FEW_ROWS:
        columns = next((count for count in COLUMNS if -(-out_size // count) >= WAVES * limits.multiprocessors),
                       COLUMNS[-1])
        rows, chunks = FEW_ROWS, STEP_INPUTS // CHUNK_BYTES * bits // 8
    else:
        rows, columns, chunks = SOME_ROWS if num_rows <= SOME_ROWS or element_size_bytes > 2 else 128, 64, 1
    step_bytes = chunks * CHUNK_BYTES * (columns + rows * (8 // bits) * element_size_bytes)
    room = min(MOST_SHARED_BYTES, limits.shared_bytes - 1024)
    # A warp has 16 outputs, those of a matrix instruction, so that no two warps make the same numbers.
    return QuantisedLinearSettings(rows, columns, chunks, columns // 16, max(1, min(MOST_STAGES, room // step_bytes)))


def quantised_linear(x, levels, scales, zeros, bits, group, bias=None, factor=1.0, residual=None, out=None):
    """Compute the product. See the module docstring for shapes."""
    (num_rows, in_size), (num_chunks, out_size, _) = x.shape, levels.shape
    assert bits in (4, 8) and num_chunks == -(-in_size * bits // (8 * CHUNK_BYTES)) and levels.is_contiguous()
    assert group == 0 or group % CHUNK_BYTES == 0 and group & (group - 1) == 0
    num_groups = scales.shape[1]
    assert num_groups == (1 if group == 0 else -(-in_size // group)) and scales.is_contiguous()
    has_zeros = isinstance(zeros, torch.Tensor)
    assert not has_zeros or zeros.shape == scales.shape and zeros.is_contiguous()
    assert residual is None or out is None
    out = residual if residual is not None else out
    if out is None:
        out = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, out_size) and x.stride(1) == out.stride(1) == 1
    if num_rows == 0:
        return out

    settings = quantised_linear_settings(num_rows, out_size, bits, x.element_size(), device_limits())
    _quantised_linear_kernel[(triton.cdiv(num_rows, settings.rows), triton.cdiv(out_size, settings.columns))](
        x, levels, scales, zeros if has_zeros else None, bias, out, 0.0 if has_zeros else float(zeros), float(factor),
        num_rows, in_size, out_size, num_chunks, num_groups, x.stride(0), out.stride(0),
        ROWS=settings.rows, COLUMNS=settings.columns, CHUNKS=settings.chunks, STAGES=settings.num_stages,
        BITS=bits, GROUP=group, CHUNK_BYTES=CHUNK_BYTES,
        HAS_ZEROS=has_zeros, HAS_BIAS=bias is not None, ADDS=residual is not None,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out
