"""RMSNorm, with an optional residual addition before it.

    residual += hidden                                    with a residual; rounded to its dtype
    x         = residual, or hidden without one
    out       = x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)

Shapes      hidden, out              [..., E]   [T, E] or [T, H, E] for H heads, such as the heads of a packed tensor;
                                                the last dimension contiguous, any stride in the others
            residual                 [T, E]   contiguous rows; None: no addition
            weight                   [E]
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     residual and out. `out` can be `hidden`. If `out` is None, the function allocates a tensor.
Oracle      triton_kernels/reference/rms_norm.py
Source      Zhang and Sennrich 2019; written for this project.

One program per row. The row stays in registers.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, out_ptr,
    epsilon, weight_offset,
    hidden_stride_t, hidden_stride_h, residual_stride_t, out_stride_t, out_stride_h,
    HEADS: tl.constexpr,                # rows per token: size of the middle dimension, or 1
    E: tl.constexpr, E_POW2: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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

    mean_square = tl.sum(row * row, 0) / E
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32) + weight_offset
    normed = row * tl.rsqrt(mean_square + epsilon) * weight
    out_ptr += token * out_stride_t + head * out_stride_h
    tl.store(out_ptr + lane, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(hidden, weight, epsilon, residual=None, weight_offset=0.0, out=None, deterministic=False):
    """Normalize over the last dimension. Returns out. See the module docstring for shapes."""
    size = hidden.shape[-1]
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    assert hidden.dim() in (2, 3) and hidden.stride(-1) == out.stride(-1) == 1
    assert residual is None or (hidden.dim() == 2 and residual.stride(-1) == 1)
    if hidden.numel() == 0:
        return out

    heads = hidden.shape[1] if hidden.dim() == 3 else 1
    size_pow2 = triton.next_power_of_2(size)
    _rms_norm_kernel[(hidden.shape[0] * heads,)](
        hidden, residual, weight, out,
        epsilon, weight_offset,
        hidden.stride(0), hidden.stride(1), 0 if residual is None else residual.stride(0),
        out.stride(0), out.stride(1),
        HEADS=heads, E=size, E_POW2=size_pow2, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, size_pow2 // 512)),
    )
    return out
