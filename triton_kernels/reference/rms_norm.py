"""RMSNorm, with an optional residual addition before it.

Arguments, results and rules are those of the kernel, in triton_kernels/rms_norm.py.
"""

import torch


def rms_norm(hidden, weight, epsilon, residual=None, weight_offset=0.0, out=None, deterministic=False):
    """Normalize over the last dimension. See the module docstring for shapes."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if residual is not None:
        residual.copy_(residual.to(wide) + hidden.to(wide))
        rows = residual.to(wide)
    else:
        rows = hidden.to(wide)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    normed = normed * (weight_offset + weight.to(wide))
    return normed.to(hidden.dtype) if out is None else out.copy_(normed)
