"""The activation of an ungated MLP on a CPU. Same contract as triton_kernels/activation.py.

Calls torch's functions in the input dtype: they compute each element in float32 and round once.
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
    """Compute f(hidden) elementwise. Returns out. See triton_kernels/activation.py for shapes."""
    result = elementwise(FUNCTIONS[kind], hidden) if deterministic else FUNCTIONS[kind](hidden)
    return result if out is None else out.copy_(result)
