"""One product for all experts of a layer: each row is multiplied by the matrix of its own expert.

    the rows of expert e are the numbers m = ends[e - 1] .. ends[e] - 1     ends[-1] = 0
    out[out_rows[m]] = factors[out_rows[m]] * (x[in_rows[m]] weight[e]^T)     the product is rounded to the dtype of x

Shapes      x                        [R, K]   rows of K inputs; contiguous rows, any row stride
            weight                   [E, N, K]   N outputs of each of E experts; contiguous
            ends                     [E] int32   ascending; the last one is M
            in_rows                  [M] int64   row of x of each number; None: row m
            out_rows                 [M] int64   row of out of each number, all different; None: row m
            factors                  [rows of out] float32   None: no factors
            out                      [M, N]   of float32 with factors, else of the dtype of x; None: allocated
Mutates     out.
Oracle      triton_kernels/reference/moe_grouped_gemm.py
Source      "MegaBlocks" (Gale et al. 2023): the products of all experts in one launch, by tiles; written for this
            project.

A tile has rows of one expert. The host does not know how many rows an expert has, so it never waits for the router. It
launches as many programs as there can be tiles, and each program finds its tile from `ends`. Those without a tile end
at once. The tile is that of `deterministic_linear`, whatever the number of rows: the bits of a row are those of that
product with its expert's matrix, and depend on nothing else.
"""

import torch
import triton
import triton.language as tl

from .deterministic_linear import linear_settings
from .device_limits import device_limits


@triton.jit(do_not_specialize_on_alignment=["ends_ptr", "in_row_ptr", "out_row_ptr", "factor_ptr"])
def _moe_grouped_gemm_kernel(
    x_ptr, weight_ptr, ends_ptr, in_row_ptr, out_row_ptr, factor_ptr, out_ptr,      # None: see the wrapper
    x_stride_t, out_stride_t,                             # elements from one row to the next
    E: tl.constexpr, E_POW2: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):
    tile = tl.program_id(0)                               # neighboring programs share a tile of the weight
    expert = tl.arange(0, E_POW2)
    end = tl.load(ends_ptr + expert, mask=expert < E, other=0)
    begin = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    num_tiles = (end - begin + ROWS - 1) // ROWS
    end_tile = tl.cumsum(num_tiles, 0)
    begin_tile = end_tile - num_tiles
    is_own = (begin_tile <= tile) & (tile < end_tile)     # of one expert; of none if there is no such tile
    first = tl.sum(tl.where(is_own, begin + (tile - begin_tile) * ROWS, 0), 0)
    last = tl.sum(tl.where(is_own, end, 0), 0)
    if first >= last:
        return
    own = tl.sum(tl.where(is_own, expert, 0), 0).to(tl.int64)

    number = first + tl.arange(0, ROWS)
    row_inside = number < last
    in_row = number.to(tl.int64)
    out_row = in_row
    if in_row_ptr is not None:
        in_row = tl.load(in_row_ptr + number, mask=row_inside, other=0)
    if out_row_ptr is not None:
        out_row = tl.load(out_row_ptr + number, mask=row_inside, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < N
    step = tl.arange(0, STEP)
    x_row_ptr = x_ptr + in_row[:, None] * x_stride_t
    weight_row_ptr = weight_ptr + own * (N * K) + column.to(tl.int64)[None, :] * K       # arrives transposed

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        inner = start + step
        if K % STEP == 0:
            x = tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None], other=0.0)
            weight = tl.load(weight_row_ptr + inner[:, None], mask=column_inside[None, :], other=0.0)
        else:
            inside = inner < K
            x = tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_row_ptr + inner[:, None], mask=inside[:, None] & column_inside[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    result = total.to(x_ptr.dtype.element_ty)
    if factor_ptr is not None:
        result = result.to(tl.float32) * tl.load(factor_ptr + out_row, mask=row_inside, other=0.0)[:, None]
    tl.store(out_ptr + out_row[:, None] * out_stride_t + column[None, :], result,
             mask=row_inside[:, None] & column_inside[None, :])


def moe_grouped_gemm(x, weight, ends, in_rows=None, out_rows=None, factors=None, out=None):
    """Multiply each row by the matrix of its expert. Returns out. See the module docstring for shapes."""
    num_experts, num_columns, size = weight.shape
    num_rows = len(x) if in_rows is None else len(in_rows)
    if out is None:
        out = torch.empty(num_rows, num_columns, dtype=x.dtype if factors is None else torch.float32, device=x.device)
    assert x.shape[1] == size and x.dtype == weight.dtype and weight.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1 and ends.shape == (num_experts,) and ends.is_contiguous()
    assert all(given is None or given.is_contiguous() for given in (in_rows, out_rows, factors))
    if num_rows == 0:
        return out

    settings = linear_settings(x.element_size(), device_limits())
    # Each expert with rows has at most one tile that is not full.
    most_tiles = (num_rows + min(num_experts, num_rows) * (settings.rows - 1)) // settings.rows
    _moe_grouped_gemm_kernel[(most_tiles, triton.cdiv(num_columns, settings.columns))](
        x, weight, ends, in_rows, out_rows, factors, out, x.stride(0), out.stride(0),
        E=num_experts, E_POW2=triton.next_power_of_2(num_experts), N=num_columns, K=size,
        ROWS=settings.rows, COLUMNS=settings.columns, STEP=settings.step, STAGES=settings.num_stages,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out
