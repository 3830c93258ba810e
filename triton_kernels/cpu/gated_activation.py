"""The nonlinearity of a gated MLP on a CPU. The contract is that of triton_kernels/gated_activation.py.

f(gate) is rounded to the dtype before it meets the other half.
"""

from .activation import FUNCTIONS, activation


def gated_activation(gate_up, kind="silu", out=None, deterministic=False):
    """f(gate) * up; see the kernel's docstring. Returns out."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = (activation(gate, kind, deterministic=True) if deterministic else FUNCTIONS[kind](gate)).mul_(up)
    return result if out is None else out.copy_(result)
