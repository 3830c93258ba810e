"""A linear layer over a matrix of quantised levels, which stay as they are in memory.

Arguments, results and rules are those of the kernel, in triton_kernels/quantised_linear.py.
"""

import torch
from torch.nn import functional


def decoded(levels, scales, zeros, bits, group, in_size):
    """Return the weights [N, in_size], in float32 at least. See the module docstring for the arguments."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    halves = (levels,) if bits == 8 else (levels & 15, levels >> 4)
    stored = torch.stack(halves, 2).transpose(0, 1).flatten(1)[:, :in_size]
    if group:
        scales = scales.repeat_interleave(group, 1)[:, :in_size]
        zeros = zeros.repeat_interleave(group, 1)[:, :in_size] if isinstance(zeros, torch.Tensor) else zeros
    return (stored.to(wide) - zeros) * scales.to(wide)


def quantised_linear(x, levels, scales, zeros, bits, group, bias=None, factor=1.0, residual=None, out=None):
    """Compute the product. See the module docstring for shapes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = decoded(levels, scales.to(torch.promote_types(scales.dtype, wide)), zeros, bits, group, x.shape[1])
    result = functional.linear(x.to(wide), weight.to(wide)) * factor
    if bias is not None:
        result = result + bias.to(wide)
    if residual is not None:
        return residual.copy_(residual.to(wide) + result)
    return result.to(x.dtype) if out is None else out.copy_(result)
