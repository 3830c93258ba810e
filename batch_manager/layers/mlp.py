"""Feed-forward networks."""

import torch

from ..triton_kernels import dispatch
from ..weights.source import Weights
from .linear import Linear

ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")


class GatedMlp:
    """down(f(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, weights: Weights, name: str, hidden_size: int, intermediate_size: int, activation: str,
                 bias: bool = False) -> None:
        self.gate_up = Linear(weights, [f"{name}.gate_proj", f"{name}.up_proj"], hidden_size, [intermediate_size] * 2,
                              bias=bias)
        self.down = Linear(weights, [f"{name}.down_proj"], intermediate_size, [hidden_size], bias=bias)
        self.activation, self._is_deterministic = activation, weights.deterministic
        self._activate = dispatch.kernel("gated_activation", weights.device)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the network's output. May overwrite `residual`."""
        gated = self._activate(self.gate_up(x), self.activation, deterministic=self._is_deterministic)
        return self.down.add_to(residual, gated)


class Mlp:
    """project(f(expand(x))), with biases."""

    def __init__(self, weights: Weights, expand: str, project: str, hidden_size: int, intermediate_size: int,
                 activation: str, transposed: bool = False) -> None:
        self.expand = Linear(weights, [expand], hidden_size, [intermediate_size], bias=True, transposed=transposed)
        self.project = Linear(weights, [project], intermediate_size, [hidden_size], bias=True, transposed=transposed)
        self.activation, self._is_deterministic = activation, weights.deterministic
        self._activate = dispatch.kernel("activation", weights.device)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the network's output. May overwrite `residual`."""
        activated = self._activate(self.expand(x), self.activation, deterministic=self._is_deterministic)
        return self.project.add_to(residual, activated)
