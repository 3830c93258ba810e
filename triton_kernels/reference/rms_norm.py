"""Root-mean-square norm, with the residual addition before it when there is one.

    residual += hidden                                    only with a residual, rounded to its dtype
    x         = residual, or hidden without one
    out       = x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)

Shapes      hidden, out              [..., E]   two or three dimensions, the last contiguous, the others with any
                                                stride (heads of a packed tensor are fine)
            residual                 [T, E]   contiguous rows; None: no addition
            weight                   [E]
Units       deterministic: asks that a row's bits depend on that row alone; the kernel's always do
Mutates     residual and out. out may be `hidden`; None: allocated.
Returns     out.
"""

import torch


def rms_norm(hidden, weight, epsilon, residual=None, weight_offset=0.0, out=None, deterministic=False):
    """Norm over the last dimension; see the module's docstring for shapes."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if residual is not None:
        residual.copy_(residual.to(wide) + hidden.to(wide))
        rows = residual.to(wide)
    else:
        rows = hidden.to(wide)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    normed = normed * (weight_offset + weight.to(wide))
    return normed.to(hidden.dtype) if out is None else out.copy_(normed)
