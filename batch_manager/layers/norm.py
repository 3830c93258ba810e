"""Norms over the last dimension."""

import torch

from ..triton_kernels import dispatch
from ..weights.source import Weights


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, computed in float32. Works on [..., size]."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.epsilon = epsilon
        self._norm = dispatch.kernel("rms_norm", weights.device)
        self._is_deterministic = weights.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.epsilon, deterministic=self._is_deterministic)


class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, computed in float32."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.bias = weights.tensor(f"{name}.bias", (size,))
        self.epsilon = epsilon
        self._norm = dispatch.kernel("layer_norm", weights.device)
        self._is_deterministic = weights.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.bias, self.epsilon, deterministic=self._is_deterministic)
