"""Norms over the last dimension."""

import torch
from torch.nn import functional

from ..triton_kernels import dispatch
from ..weights.source import Weights


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, computed in float32. Works on [..., size]."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.epsilon = epsilon
        self._kernel = dispatch.kernel("rms_norm", weights.device) if dispatch.use_triton(weights.device) else None
        self._root_epsilon = torch.tensor((size * epsilon) ** 0.5, device=weights.device)
        self._root_weight = self.weight.float() * size**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.epsilon)
        # sqrt(sum(x^2) + size * epsilon): four operations, where torch's own norm takes up to ten on a CPU.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._root_epsilon)
        return torch.mul(x / length, self._root_weight, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))


class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, computed in float32."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.bias = weights.tensor(f"{name}.bias", (size,))
        self.shape, self.epsilon = (size,), epsilon
        self._kernel = dispatch.kernel("layer_norm", weights.device) if dispatch.use_triton(weights.device) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.bias, self.epsilon)
        return functional.layer_norm(x, self.shape, self.weight, self.bias, self.epsilon)
