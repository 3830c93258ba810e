"""The activation of a gated MLP, on its packed projection.

Arguments, results and rules are those of the kernel, in triton_kernels/gated_activation.py.
"""

import torch

from .activation import FUNCTIONS


def gated_activation(gate_up, kind="silu", out=None, deterministic=False):
    """Compute f(gate) * up. See the module docstring for shapes."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    result = FUNCTIONS[kind](gate) * up
    return result.to(gate_up.dtype) if out is None else out.copy_(result)
