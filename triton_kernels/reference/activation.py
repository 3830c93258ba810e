"""The activation of an ungated MLP.

    out = f(hidden)        f: "gelu"      x * Phi(x), with the error function
                              "gelu_new"  the tanh approximation of "gelu" (GPT-2)
                              "silu"      x * sigmoid(x)
                              "relu"      max(x, 0)

Shapes      hidden, out              [T, I]   T rows of I entries; contiguous rows, any row stride
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     out, which can be `hidden`; None: allocated.
Returns     out.
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
