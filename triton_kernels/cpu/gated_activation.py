"""The activation of a gated MLP on a CPU. Same contract as triton_kernels/gated_activation.py.

The activated gate is rounded to the dtype before it is multiplied by `up`.
"""

from .activation import FUNCTIONS, activation


def gated_activation(gate_up, kind="silu", out=None, deterministic=False):
    """Compute f(gate) * up. Returns out. See triton_kernels/gated_activation.py for shapes."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = (activation(gate, kind, deterministic=True) if deterministic else FUNCTIONS[kind](gate)).mul_(up)
    return result if out is None else out.copy_(result)
