"""LayerNorm, with an optional residual addition before it.

Arguments, results and rules are those of the kernel, in triton_kernels/layer_norm.py.
"""

import torch


def layer_norm(hidden, weight, bias, epsilon, residual=None, out=None, deterministic=False):
    """Normalize over the last dimension. See the module docstring for shapes."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if residual is not None:
        residual.copy_(residual.to(wide) + hidden.to(wide))
        rows = residual.to(wide)
    else:
        rows = hidden.to(wide)
    centred = rows - rows.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon) * weight.to(wide)
    if bias is not None:
        normed = normed + bias.to(wide)
    return normed.to(hidden.dtype) if out is None else out.copy_(normed)
