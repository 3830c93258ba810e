"""The nonlinearity of an ungated MLP on a CPU. The contract is that of triton_kernels/activation.py.

torch's functions in the dtype they are given: each computes an element in float32 and rounds once.
"""

from torch.nn import functional

from .fixed_pieces import elementwise

FUNCTIONS = {
    "gelu": functional.gelu,
    "gelu_new": lambda rows: functional.gelu(rows, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


def activation(hidden, kind, out=None, deterministic=False):
    """f(hidden), elementwise; see the kernel's docstring. Returns out."""
    result = elementwise(FUNCTIONS[kind], hidden) if deterministic else FUNCTIONS[kind](hidden)
    return result if out is None else out.copy_(result)
