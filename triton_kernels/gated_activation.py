"""The activation of a gated MLP, on its packed projection.

    out = f(gate_up[:, :I]) * gate_up[:, I:]        f is named by `kind`: "silu", "gelu", "gelu_new", "relu"

Shapes      gate_up                  [T, 2 I]   gate first, then up; contiguous rows, any row stride
            out                      [T, I]   None: allocated
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     out.
Raises      ValueError for another `kind`.
Oracle      triton_kernels/reference/gated_activation.py
Source      Shazeer 2020; written for this project.
"""

import torch
import triton
import triton.language as tl

from .activation import BLOCK, apply_activation, refuse_unknown_kind


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, out_ptr, size, gate_up_stride_t, out_stride_t, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    gate_ptr = gate_up_ptr + token * gate_up_stride_t + lane
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=inside, other=0.0).to(tl.float32)
    result = apply_activation(gate, KIND) * up
    tl.store(out_ptr + token * out_stride_t + lane, result.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up, kind="silu", out=None, deterministic=False):
    """Compute f(gate) * up. Returns out. See the module docstring for shapes."""
    refuse_unknown_kind(kind)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    assert gate_up.shape[1] == 2 * size and gate_up.stride(1) == out.stride(1) == 1
    if gate_up.numel() == 0:
        return out

    _gated_activation_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        gate_up, out, size, gate_up.stride(0), out.stride(0), KIND=kind, BLOCK=BLOCK, num_warps=4
    )
    return out
