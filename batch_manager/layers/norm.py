"""Norms over the last dimension."""

import torch

from ..triton_kernels import dispatch
from ..weights.source import Weights
from .context import LayerContext
from .recording import Rows


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight), computed in float32. Works on [..., size].

    weight_offset   1 where a checkpoint stores what is to be added to one (Gemma)
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, size: int, epsilon: float,
                 weight_offset: float = 0.0) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.epsilon, self.weight_offset = epsilon, weight_offset
        self._norm, self._is_deterministic = dispatch.kernel("rms_norm", context.device), context.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape; x has two or three dimensions."""
        if isinstance(x, Rows):
            return x.normed(self.weight, None, self.epsilon, self.weight_offset)
        return self._norm(x, self.weight, self.epsilon, weight_offset=self.weight_offset,
                          deterministic=self._is_deterministic)


class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, computed in float32. Works on [..., size].

    bias   False: the checkpoint has none
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, size: int, epsilon: float,
                 bias: bool = True) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.bias = weights.tensor(f"{name}.bias", (size,)) if bias else torch.zeros_like(self.weight)
        self.epsilon = epsilon
        self._norm, self._is_deterministic = dispatch.kernel("layer_norm", context.device), context.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape; x has two or three dimensions."""
        if isinstance(x, Rows):
            return x.normed(self.weight, self.bias, self.epsilon)
        return self._norm(x, self.weight, self.bias, self.epsilon, deterministic=self._is_deterministic)
