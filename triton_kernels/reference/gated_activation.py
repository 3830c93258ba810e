"""The nonlinearity of a gated MLP, from its packed projection.

    out = f(gate_up[:, :I]) * gate_up[:, I:]        f as in `activation`: "silu", "gelu", "gelu_new", "relu"

Shapes      gate_up                  [T, 2 I]   gate first, then up; contiguous rows, any row stride
            out                      [T, I]   None: allocated
Units       deterministic: asks that a row's bits depend on that row alone; the kernel's always do
Mutates     out.
Returns     out.
"""

import torch

from .activation import FUNCTIONS


def gated_activation(gate_up, kind="silu", out=None, deterministic=False):
    """f(gate) * up; see the module's docstring."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    result = FUNCTIONS[kind](gate) * up
    return result.to(gate_up.dtype) if out is None else out.copy_(result)
