"""A linear layer over a matrix of quantised levels, which stay as they are in memory.

    W[n, k]  = (level[n, k] - zero point[n, group of k]) * scale[n, group of k]
    out      = factor * (x W^T) + bias              without a residual
    residual = residual + factor * (x W^T) + bias   with one, in place, rounded once

Shapes      x           [T, K]   T rows of K inputs; contiguous rows, any row stride
            levels      [chunks, N, 32] uint8   of N outputs. 8 bits: byte b of chunk c is the level of input 32 c + b.
                        4 bits: its lower half is that of input 64 c + b, its upper half that of input 64 c + 32 + b
            scales      [N, groups]
            zeros       [N, groups] int16, or one number for all
            bits        4 or 8
            group       inputs of a group; 0: all inputs are one group
            bias        [N] or None
            residual    [T, N]   None: no residual
            out         [T, N]   None: allocated
Mutates     residual, or else out.
Returns     the mutated tensor.
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
