"""A linear layer for at most MOST_ROWS rows, fused with the norm before it and the activation or residual sum after it.

Arguments, results and rules are those of the kernel, in triton_kernels/fused_linear.py.
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
