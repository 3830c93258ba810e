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
Returns     out.
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
