"""A linear map of few rows in one launch with the norm before it and with what comes after it.

    n    = x, or its root-mean-square norm, or its layer norm, rounded to the dtype of x
    y    = n W^T + bias
    out  = y                                             plain
           f(y), of y rounded to the dtype               with an activation, one of `activation.KINDS`
           f(y[:, :I]) * y[:, I:], likewise              gated; I is half of the rows of W
           residual + y, rounded once                    with a residual, in place

Shapes      x                        [T, K]   contiguous rows, any row stride; T is at most MOST_ROWS
            weight                   [N, K]   contiguous; [2 I, K] when gated, the gate's rows first
            bias                     [N]   may be None
            norm_weight, norm_bias   [K]   norm_weight None: no norm; norm_bias None: the root-mean-square norm,
                                           x / sqrt(mean(x^2) + epsilon) * (weight_offset + norm_weight)
            residual                 [T, N]   contiguous rows; None: nothing is added
            out                      [T, N], or [T, I] when gated   None: allocated
Mutates     residual, or out where there is none. Neither may share memory with x.
Returns     what it mutates.
"""

import torch

from .activation import activation as activate
from .gated_activation import gated_activation
from .layer_norm import layer_norm
from .rms_norm import rms_norm


def fused_linear(x, weight, bias=None, norm_weight=None, norm_bias=None, epsilon=0.0, weight_offset=0.0,
                 activation=None, gated=False, residual=None, out=None):
    """Norm, product and what comes after it; see the module's docstring for shapes."""
    if norm_weight is not None and norm_bias is None:
        x = rms_norm(x, norm_weight, epsilon, weight_offset=weight_offset)
    elif norm_weight is not None:
        x = layer_norm(x, norm_weight, norm_bias, epsilon)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide).t()
    if bias is not None:
        y = y + bias.to(wide)
    if residual is not None:
        return residual.copy_(residual.to(wide) + y)
    y = y.to(x.dtype)
    if activation is not None:
        y = gated_activation(y, activation) if gated else activate(y, activation)
    return y if out is None else out.copy_(y)
