"""Feed-forward networks. A call returns the output; `add_to` adds the output to a residual, in one matrix product."""

from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..weights.source import Weights
from .context import LayerContext
from .linear import Linear
from .recording import Rows

ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")


class Mlp:
    """The network project(f(expand(x))). f is the activation function, one of ACTIVATIONS.

    bias         whether both projections have a bias
    transposed   the checkpoint stores both weights as [in, out] (GPT-2's Conv1D)
    """

    _is_gated = False

    def __init__(self, weights: Weights, context: LayerContext, expand: str, project: str, hidden_size: int,
                 intermediate_size: int, activation: str, transposed: bool = False, bias: bool = True) -> None:
        self._set_activation(activation, context, f"Mlp {expand}")
        self.expand = Linear(weights, context, [expand], hidden_size, [intermediate_size], bias=bias,
                             transposed=transposed, split="columns")
        self.project = Linear(weights, context, [project], intermediate_size, [hidden_size], bias=bias,
                              transposed=transposed, split="rows")

    def _set_activation(self, activation: str, context: LayerContext, layer: str) -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"{layer} has the activation {activation!r}", f"expected one of {', '.join(ACTIVATIONS)}",
                              "")
        self.activation, self._is_deterministic = activation, context.deterministic
        self._activate = dispatch.kernel("gated_activation" if self._is_gated else "activation", context.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for x [T, hidden size] as a new tensor [T, hidden size]."""
        return self.project(self._activated(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + the output. May overwrite `residual`."""
        return self.project.add_to(residual, self._activated(x))

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Rows):
            return self.expand(x).activated(self.activation, gated=self._is_gated)
        return self._activate(self.expand(x), self.activation, deterministic=self._is_deterministic)


class GatedMlp(Mlp):
    """The gated network down(f(gate(x)) * up(x)). Gate and up are one matrix product.

    f is the activation function, one of ACTIVATIONS.

    gate_up   names of gate and up in the checkpoint: two tensors, or one tensor with gate before up
    down      name of down
    scale     factor on the output; None: no factor
    """

    _is_gated = True

    def __init__(self, weights: Weights, context: LayerContext, name: str, hidden_size: int, intermediate_size: int,
                 activation: str, bias: bool = False, gate_up: Sequence[str] = ("gate_proj", "up_proj"),
                 down: str = "down_proj", scale: float | None = None) -> None:
        self._set_activation(activation, context, f"GatedMlp {name}")
        self.expand = Linear(weights, context, [f"{name}.{part}" for part in gate_up], hidden_size,
                             [intermediate_size] * 2, bias=bias, split="columns")
        self.project = Linear(weights, context, [f"{name}.{down}"], intermediate_size, [hidden_size], bias=bias,
                              split="rows", scale=scale)
