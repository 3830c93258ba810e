"""A deterministic linear layer: the bits of a row depend on that row alone.

    out = x W^T + bias

Shapes      x                        [T, K]   T rows of K inputs; contiguous rows, any row stride
            weight                   [N, K]   N outputs; contiguous
            bias                     [N] or None
            out                      [T, N]   None: allocated
Mutates     out.
Oracle      triton_kernels/reference/deterministic_linear.py
Source      tiled matrix product; "Defeating Nondeterminism in LLM Inference" (He et al. 2025) explains the fixed tile;
            written for this project.

A library selects the tile, the instruction and the split of K by the number of rows, so the result of a row depends on
the batch. Here the tile depends only on the element size, one program walks all of K in fixed steps, and nothing is
tuned. A batch of one row uses the same tile as a batch of a thousand rows, although most of its tile is padding. This
costs little, because reading the weights takes most of the time of a small batch. The slowdown of large batches
compared to a library has not been measured.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .device_limits import DeviceLimits, device_limits


# The number of rows changes from step to step: it must not recompile the kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _deterministic_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    num_rows, x_stride_t, out_stride_t,                   # elements from one row to the next
    N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)    # neighboring programs share a tile of the weight
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    row_inside = row < num_rows
    column_inside = column < N
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride_t
    weight_row_ptr = weight_ptr + column.to(tl.int64)[None, :] * K        # arrives transposed

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        inner = start + step
        if K % STEP == 0:
            x = tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None], other=0.0)
            weight = tl.load(weight_row_ptr + inner[:, None], mask=column_inside[None, :], other=0.0)
        else:
            inner_inside = inner < K
            x = tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None] & inner_inside[None, :], other=0.0)
            weight = tl.load(
                weight_row_ptr + inner[:, None], mask=inner_inside[:, None] & column_inside[None, :], other=0.0
            )
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * out_stride_t + column[None, :], total.to(out_ptr.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )


class LinearSettings(NamedTuple):
    """Launch settings: rows and columns of the tile of one program, and its step along K, in elements."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


def linear_settings(element_size_bytes: int, limits: DeviceLimits) -> LinearSettings:
    """Return the launch settings. They do not depend on the number of rows.

    The number of stages depends on the shared memory of the device, but does not change the order of a sum.
    """
    rows, columns, step = (32, 32, 32) if element_size_bytes == 4 else (64, 64, 64)
    num_stages = 4
    while num_stages > 1 and num_stages * (rows + columns) * step * element_size_bytes > limits.shared_bytes - 1024:
        num_stages -= 1
    return LinearSettings(rows, columns, step, num_warps=4, num_stages=num_stages)


def deterministic_linear(x, weight, bias=None, out=None):
    """Compute x W^T + bias. Returns out. See the module docstring for shapes."""
    num_rows, size = x.shape
    num_columns = weight.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device) if out is None else out
    assert weight.shape[1] == size and weight.is_contiguous() and x.stride(1) == out.stride(1) == 1
    assert x.dtype == weight.dtype
    if num_rows == 0:
        return out

    settings = linear_settings(x.element_size(), device_limits())
    grid = (triton.cdiv(num_rows, settings.rows), triton.cdiv(num_columns, settings.columns))
    _deterministic_linear_kernel[grid](
        x, weight, bias, out, num_rows, x.stride(0), out.stride(0),
        N=num_columns, K=size, ROWS=settings.rows, COLUMNS=settings.columns, STEP=settings.step,
        STAGES=settings.num_stages, HAS_BIAS=bias is not None,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out
