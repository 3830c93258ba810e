"""The activation of an ungated MLP.

Arguments, results and rules are those of the kernel, in triton_kernels/activation.py.
"""

import torch
from torch.nn import functional

FUNCTIONS = {
    "gelu": functional.gelu,
    "gelu_new": lambda rows: functional.gelu(rows, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


def activation(hidden, kind, out=None, deterministic=False):
    """Compute f(hidden) elementwise. See the module docstring for shapes."""
    result = FUNCTIONS[kind](hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
    return result.to(hidden.dtype) if out is None else out.copy_(result)
