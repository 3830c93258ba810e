"""The activation of an ungated MLP.

    out = f(hidden)        f: "gelu"      x * Phi(x), with the error function
                              "gelu_new"  the tanh approximation of "gelu" (GPT-2)
                              "silu"      x * sigmoid(x)
                              "relu"      max(x, 0)

Shapes      hidden, out              [T, I]   T rows of I entries; contiguous rows, any row stride
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     out, which can be `hidden`; None: allocated.
Raises      ValueError for an unknown kind.
Oracle      triton_kernels/reference/activation.py
Source      Hendrycks and Gimpel 2016 (gelu); written for this project.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024                            # elements per program
KINDS = "gelu", "gelu_new", "silu", "relu"


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """Return f(x) for float32 x and the function f named KIND. Also used by `gated_activation` and `fused_linear`."""
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_new":            # 0.5 (1 + tanh z) is sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "silu":
        return x * tl.sigmoid(x)
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _activation_kernel(
    hidden_ptr, out_ptr, size, hidden_stride_t, out_stride_t, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    x = tl.load(hidden_ptr + token * hidden_stride_t + lane, mask=inside, other=0.0).to(tl.float32)
    result = apply_activation(x, KIND)
    tl.store(out_ptr + token * out_stride_t + lane, result.to(out_ptr.dtype.element_ty), mask=inside)


def refuse_unknown_kind(kind):
    """Raise ValueError for an unknown kind. Checked on the host, because errors inside kernels vary by backend."""
    if kind not in KINDS:
        raise ValueError(f"unknown activation {kind!r}; expected one of {', '.join(KINDS)}")


def activation(hidden, kind, out=None, deterministic=False):
    """Compute f(hidden) elementwise. Returns out. See the module docstring for shapes."""
    refuse_unknown_kind(kind)
    num_tokens, size = hidden.shape
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    assert hidden.stride(1) == out.stride(1) == 1
    if hidden.numel() == 0:
        return out

    _activation_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        hidden, out, size, hidden.stride(0), out.stride(0), KIND=kind, BLOCK=BLOCK, num_warps=4
    )
    return out
