"""Feed-forward networks."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from ..triton_kernels import dispatch
from ..triton_kernels.fixed_pieces import elementwise
from ..weights.source import Weights
from .linear import Linear

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def activation_function(weights: Weights, activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """f of ACTIVATIONS; with deterministic weights in pieces of fixed shape: a vector loop's tail rounds otherwise."""
    function = ACTIVATIONS[activation]
    return partial(elementwise, function) if weights.deterministic else function


class GatedMlp:
    """down(f(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, weights: Weights, name: str, hidden_size: int, intermediate_size: int, activation: str,
                 bias: bool = False) -> None:
        self.gate_up = Linear(weights, [f"{name}.gate_proj", f"{name}.up_proj"], hidden_size, [intermediate_size] * 2,
                              bias=bias)
        self.down = Linear(weights, [f"{name}.down_proj"], intermediate_size, [hidden_size], bias=bias)
        self.activation, self._function = activation, activation_function(weights, activation)
        on_triton = dispatch.use_triton(weights.device)
        self._kernel = dispatch.kernel("gated_activation", weights.device) if on_triton else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the network's output. May overwrite `residual`."""
        gate_up = self.gate_up(x)
        if self._kernel is not None:
            return self.down.add_to(residual, self._kernel(gate_up, self.activation))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down.add_to(residual, self._function(gate).mul_(up))


class Mlp:
    """project(f(expand(x))), with biases."""

    def __init__(self, weights: Weights, expand: str, project: str, hidden_size: int, intermediate_size: int,
                 activation: str, transposed: bool = False) -> None:
        self.expand = Linear(weights, [expand], hidden_size, [intermediate_size], bias=True, transposed=transposed)
        self.project = Linear(weights, [project], intermediate_size, [hidden_size], bias=True, transposed=transposed)
        self.activation, self._function = activation, activation_function(weights, activation)
        on_triton = dispatch.use_triton(weights.device)
        self._kernel = dispatch.kernel("activation", weights.device) if on_triton else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the network's output. May overwrite `residual`."""
        expanded = self.expand(x)
        if self._kernel is not None:
            return self.project.add_to(residual, self._kernel(expanded, self.activation))
        return self.project.add_to(residual, self._function(expanded))
