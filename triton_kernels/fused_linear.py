"""A linear layer for at most MOST_ROWS rows, fused with the norm before it and the activation or residual sum after it.

    n    = x, or RMSNorm of x, or LayerNorm of x, rounded to the dtype of x
    y    = n W^T + bias
    out  = y                                             without activation and residual
           f(y), with y rounded to the dtype             with an activation, one of `activation.KINDS`
           f(y[:, :I]) * y[:, I:], with y rounded        with a gated activation; I is half of the rows of W
           residual + y, rounded once                    with a residual, in place

Shapes      x                        [T, K]   T rows of K inputs, T <= MOST_ROWS; contiguous rows, any row stride
            weight                   [N, K]   N outputs; contiguous; [2 I, K] when gated, the rows of the gate first
            bias                     [N] or None
            norm_weight, norm_bias   [K]   norm_weight None: no norm; norm_bias None: RMSNorm,
                                           x / sqrt(mean(x^2) + epsilon) * (weight_offset + norm_weight)
            residual                 [T, N]   contiguous rows; None: no residual
            out                      [T, N], or [T, I] when gated   None: allocated
Mutates     residual, or else out. Neither may share memory with x.
Returns     the mutated tensor.
Raises      ValueError for an unknown activation.
Oracle      triton_kernels/reference/fused_linear.py
Source      tiled matrix product; norms as in rms_norm and layer_norm; written for this project.

Each program multiplies a tile of rows of x with several rows of the weight, prefetching several pieces of both. Up to
FEW_ROWS rows are one small tile, and the product takes as long as reading the weight; more rows are divided into tiles
of TILE_ROWS. No sum is split across programs, so the order of additions depends on the sizes and on the tile of rows
alone. Intermediate results are rounded as in separate launches, but for RMSNorm.

RMSNorm scales the product instead of x: a program multiplies x by the norm's weight, adds up the squares of x in the
same loop, and scales the product by 1 / sqrt(mean(x^2) + epsilon). So n = x * (weight_offset + norm_weight) is rounded
before the scale, and the error is as large as otherwise. float16 has too small a range for this n. With it, as with
LayerNorm, a program reads its rows of x before the product, once for RMSNorm and twice for LayerNorm, to compute the
scale of each row; x is small and cached.
"""

import torch
import triton
import triton.language as tl

from .activation import apply_activation, refuse_unknown_kind
from .device_limits import device_limits
from .fused_linear_settings import MOST_ROWS, fused_linear_settings, reads_of_x


@triton.jit
def _rows_of(x_row_ptr, row_inside, start, STEP: tl.constexpr, K: tl.constexpr):
    """Load entries start .. start + STEP - 1 of each row of x; zeros for rows and entries that do not exist."""
    inner = start + tl.arange(0, STEP)
    if K % STEP == 0:
        return tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None], other=0.0)
    else:
        return tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None] & (inner < K)[None, :], other=0.0)


@triton.jit
def _piece_of(weight_row_ptr, column_inside, start, STEP: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr):
    """Load entries start .. start + STEP - 1 of the program's rows of the weight, transposed.

    Rows and entries that do not exist are zeros.
    """
    inner = start + tl.arange(0, STEP)
    if K % STEP == 0:
        if MASKED:
            return tl.load(weight_row_ptr + inner[:, None], mask=column_inside[None, :], other=0.0)
        else:
            return tl.load(weight_row_ptr + inner[:, None])
    else:
        return tl.load(weight_row_ptr + inner[:, None], mask=(inner < K)[:, None] & column_inside[None, :], other=0.0)


# The number of rows changes from step to step: it must not recompile the kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _fused_linear_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, bias_ptr, out_ptr,
    epsilon, weight_offset,
    num_rows, x_stride_t, out_stride_t,                   # elements from one row to the next
    N: tl.constexpr, K: tl.constexpr,                     # N: of out
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr,                                   # "none", "rms" or "layer"
    READS: tl.constexpr,                                  # times that a program reads its rows of x
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_inside = row < num_rows
    column_inside = column < N
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride_t
    weight_row_ptr = weight_ptr + column.to(tl.int64)[None, :] * K        # arrives transposed
    out_tile_ptr = out_ptr + row.to(tl.int64)[:, None] * out_stride_t + column[None, :]
    out_inside = row_inside[:, None] & column_inside[None, :]

    # Loaded early, used at the end.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_inside, other=0.0)
        if GATED:
            up_bias = tl.load(bias_ptr + N + column, mask=column_inside, other=0.0)
    if ADDS:
        residual = tl.load(out_tile_ptr, mask=out_inside, other=0.0)

    if NORM == "layer":
        total = tl.zeros([ROWS, STEP], tl.float32)
        for start in tl.range(0, K, STEP, num_stages=STAGES):
            total += _rows_of(x_row_ptr, row_inside, start, STEP, K).to(tl.float32)
        mean = tl.sum(total, 1) / K
    if READS > 1:
        squares = tl.zeros([ROWS, STEP], tl.float32)
        for start in tl.range(0, K, STEP, num_stages=STAGES):
            x = _rows_of(x_row_ptr, row_inside, start, STEP, K).to(tl.float32)
            if NORM == "layer":
                x -= mean[:, None]
                if K % STEP != 0:
                    x = tl.where((start + tl.arange(0, STEP) < K)[None, :], x, 0.0)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)

    # Of a norm that scales the product. Sums of two squares, because one of each entry takes too many registers.
    pairs = tl.zeros([ROWS, STEP // 2], tl.float32)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        x = _rows_of(x_row_ptr, row_inside, start, STEP, K)
        weight = _piece_of(weight_row_ptr, column_inside, start, STEP, K, N % COLUMNS != 0)
        if NORM != "none":
            inner = start + tl.arange(0, STEP)
            inner_inside = inner < K
            norm_weight = tl.load(norm_weight_ptr + inner, mask=inner_inside, other=0.0).to(tl.float32) + weight_offset
            normed = x.to(tl.float32)
            if NORM == "layer":
                normed -= mean[:, None]
            if READS > 1:
                normed *= scale[:, None]
            else:
                pairs += tl.sum(tl.reshape(normed * normed, [ROWS, STEP // 2, 2]), 2)
                # A sum of one term. It keeps the compiler from computing all of `normed` in every warp.
                norm_weight = tl.sum(norm_weight[None, :], 0)
            normed *= norm_weight[None, :]
            if NORM == "layer":
                norm_bias = tl.load(norm_bias_ptr + inner, mask=inner_inside, other=0.0).to(tl.float32)
                normed += norm_bias[None, :]
            x = normed.to(x.dtype)
        product = tl.dot(x, weight, product, input_precision="ieee")
        if GATED:
            # N * K may exceed 32 bits.
            up_weight = _piece_of(weight_row_ptr + tl.full([], N, tl.int64) * K, column_inside, start, STEP, K,
                                  N % COLUMNS != 0)
            up = tl.dot(x, up_weight, up, input_precision="ieee")

    if NORM == "rms" and READS == 1:
        scale = tl.rsqrt(tl.sum(pairs, 1) / K + epsilon)
        product *= scale[:, None]
        up *= scale[:, None]

    if HAS_BIAS:
        product += bias.to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    if KIND != "none":
        product = apply_activation(product.to(dtype).to(tl.float32), KIND)
    if GATED:
        if HAS_BIAS:
            up += up_bias.to(tl.float32)[None, :]
        product *= up.to(dtype).to(tl.float32)
    if ADDS:
        product += residual.to(tl.float32)
    tl.store(out_tile_ptr, product.to(dtype), mask=out_inside)


def fused_linear(x, weight, bias=None, norm_weight=None, norm_bias=None, epsilon=0.0, weight_offset=0.0,
                 activation=None, gated=False, residual=None, out=None):
    """Apply norm, product, and activation or residual. See the module docstring for shapes."""
    num_rows, in_size = x.shape
    out_size = weight.shape[0] // (2 if gated else 1)
    assert residual is None or activation is None and out is None
    assert activation is not None or not gated
    if activation is not None:
        refuse_unknown_kind(activation)
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    assert weight.shape == (out_size * (2 if gated else 1), in_size) and weight.is_contiguous()
    assert out.shape == (num_rows, out_size) and x.stride(1) == out.stride(1) == 1
    assert x.dtype == weight.dtype == out.dtype
    assert num_rows <= MOST_ROWS
    if num_rows == 0:
        return out

    norm = "none" if norm_weight is None else "rms" if norm_bias is None else "layer"
    settings = fused_linear_settings(num_rows, in_size, out_size, gated, norm, x.dtype, device_limits())
    _fused_linear_kernel[(triton.cdiv(out_size, settings.columns), triton.cdiv(num_rows, settings.rows))](
        x, norm_weight, norm_bias, weight, bias, out, float(epsilon), float(weight_offset),
        num_rows, x.stride(0), out.stride(0),
        N=out_size, K=in_size, ROWS=settings.rows, COLUMNS=settings.columns, STEP=settings.step,
        STAGES=settings.num_stages, NORM=norm, READS=reads_of_x(norm, x.dtype),
        HAS_BIAS=bias is not None, KIND=activation or "none", GATED=gated, ADDS=residual is not None,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out
