"""The activation of a gated MLP, on its packed projection.

    out = f(gate_up[:, :I]) * gate_up[:, I:]        f is named by `kind`: "silu", "gelu", "gelu_new", "relu"

Shapes      gate_up                  [T, 2 I]   gate first, then up; contiguous rows, any row stride
            out                      [T, I]   None: allocated
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
Mutates     out.
Returns     out.
"""

import torch

from .activation import FUNCTIONS


def gated_activation(gate_up, kind="silu", out=None, deterministic=False):
    """Compute f(gate) * up. See the module docstring for shapes."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    result = FUNCTIONS[kind](gate) * up
    return result.to(gate_up.dtype) if out is None else out.copy_(result)
