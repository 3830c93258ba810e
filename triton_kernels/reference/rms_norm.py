"""RMSNorm, with an optional residual addition before it.

    residual += hidden                                    with a residual; rounded to its dtype
    x         = residual, or hidden without one
    out       = x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)

Shapes      hidden, out              [..., E]   [T, E] or [T, H, E] for H heads, such as the heads of a packed tensor;
                                                the last dimension contiguous, any stride in the others
            residual                 [T, E]   contiguous rows; None: no addition
            weight                   [E]
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     residual and out. out can be `hidden`; None: allocated.
Returns     out.
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
