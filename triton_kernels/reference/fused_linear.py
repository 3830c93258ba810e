"""A linear layer for at most MOST_ROWS rows, fused with the norm before it and the activation or residual sum after it.

    n    = x, or RMSNorm of x, or LayerNorm of x, rounded to the dtype of x
    y    = n W^T + bias
    out  = y                                             without activation and residual
           f(y), with y rounded to the dtype             with an activation, one of `activation.KINDS`
           f(y[:, :I]) * y[:, I:], with y rounded        with a gated activation; I is half of the rows of W
           residual + y, rounded once                    with a residual, in place

Shapes      x                        [T, K]   T rows of K inputs, T <= MOST_ROWS; contiguous rows, any row stride
            weight                   [N, K]   N outputs; contiguous; [2 I, K] when gated, the rows of the gate first
            bias                     [N] or None
            norm_weight, norm_bias   [K]   norm_weight None: no norm; norm_bias None: RMSNorm,
                                           x / sqrt(mean(x^2) + epsilon) * (weight_offset + norm_weight)
            residual                 [T, N]   contiguous rows; None: no residual
            out                      [T, N], or [T, I] when gated   None: allocated
Mutates     residual, or else out. Neither may share memory with x.
Returns     the mutated tensor.
"""

import torch

from .activation import activation as activate
from .gated_activation import gated_activation
from .layer_norm import layer_norm
from .rms_norm import rms_norm


def fused_linear(x, weight, bias=None, norm_weight=None, norm_bias=None, epsilon=0.0, weight_offset=0.0,
                 activation=None, gated=False, residual=None, out=None):
    """Apply norm, product, and activation or residual. See the module docstring for shapes."""
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
