"""LayerNorm, with an optional residual addition before it.

    residual += hidden                                    with a residual; rounded to its dtype
    x         = residual, or hidden without one
    out       = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias

Shapes      hidden, out              [..., E]   [T, E] or [T, H, E] for H heads; the last dimension contiguous, any
                                                stride in the others
            residual                 [T, E]   contiguous rows; None: no addition
            weight                   [E], or [H, E] if hidden is [T, H, E]
            bias                     [E] or None
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     residual and out. `out` can be `hidden`. If `out` is None, the function allocates a tensor.
Oracle      triton_kernels/reference/layer_norm.py
Source      Ba, Kiros and Hinton 2016; written for this project.

One program per row. The row stays in registers, so a second pass can compute the variance around the mean.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _layer_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr,
    epsilon,
    hidden_stride_t, hidden_stride_h, residual_stride_t, weight_stride_h, out_stride_t, out_stride_h,
    HEADS: tl.constexpr,                # rows per token: size of the middle dimension, or 1
    E: tl.constexpr, E_POW2: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) // HEADS
    head = tl.program_id(0) % HEADS
    lane = tl.arange(0, E_POW2)
    inside = lane < E

    row = tl.load(hidden_ptr + token * hidden_stride_t + head * hidden_stride_h + lane, mask=inside, other=0.0)
    row = row.to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride_t + lane, mask=inside, other=0.0)
        residual = (row + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + token * residual_stride_t + lane, residual, mask=inside)
        row = residual.to(tl.float32)

    centred = tl.where(inside, row - tl.sum(row, 0) / E, 0.0)
    variance = tl.sum(centred * centred, 0) / E
    normed = centred * tl.rsqrt(variance + epsilon)
    normed = normed * tl.load(weight_ptr + head * weight_stride_h + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed = normed + tl.load(bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    out_ptr += token * out_stride_t + head * out_stride_h
    tl.store(out_ptr + lane, normed.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(hidden, weight, bias, epsilon, residual=None, out=None, deterministic=False):
    """Normalize over the last dimension. Returns `out` or the allocated tensor. See the module docstring for shapes."""
    size = hidden.shape[-1]
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    assert hidden.dim() in (2, 3) and hidden.stride(-1) == out.stride(-1) == 1
    assert residual is None or (hidden.dim() == 2 and residual.stride(-1) == 1)
    assert weight.dim() == 1 or (weight.shape == hidden.shape[1:] and weight.is_contiguous())
    if hidden.numel() == 0:
        return out

    heads = hidden.shape[1] if hidden.dim() == 3 else 1
    size_pow2 = triton.next_power_of_2(size)
    _layer_norm_kernel[(hidden.shape[0] * heads,)](
        hidden, residual, weight, bias, out,
        epsilon,
        hidden.stride(0), hidden.stride(1), 0 if residual is None else residual.stride(0),
        0 if weight.dim() == 1 else size, out.stride(0), out.stride(1),
        HEADS=heads, E=size, E_POW2=size_pow2, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None,
        num_warps=min(16, max(1, size_pow2 // 512)),
    )
    return out
