"""A deterministic linear layer: the bits of a row depend on that row alone.

Arguments, results and rules are those of the kernel, in triton_kernels/deterministic_linear.py.

The oracle itself is not deterministic: torch selects its routine for the product by the number of rows.
"""

import torch
from torch.nn import functional


def deterministic_linear(x, weight, bias=None, out=None):
    """Compute x W^T + bias. See the module docstring for shapes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    result = functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return result.to(x.dtype) if out is None else out.copy_(result)
