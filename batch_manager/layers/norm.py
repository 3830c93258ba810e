"""Norms over the last dimension."""

import torch
from torch.nn import functional

from ..triton_kernels import dispatch
from ..triton_kernels.fixed_pieces import row_by_row
from ..weights.source import Weights


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, computed in float32. Works on [..., size]."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.epsilon = epsilon
        self._kernel = dispatch.kernel("rms_norm", weights.device) if dispatch.use_triton(weights.device) else None
        self._is_deterministic = weights.deterministic
        self._root_epsilon = torch.tensor((size * epsilon) ** 0.5, dtype=torch.float32, device=weights.device)
        self._root_weight = self.weight.float() * size**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.epsilon)
        if self._is_deterministic:
            return self._row_by_row(x)
        # sqrt(sum(x^2) + size * epsilon): four operations, where torch's own norm takes up to ten on a CPU.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._root_epsilon)
        return torch.mul(x / length, self._root_weight, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def _row_by_row(self, x: torch.Tensor) -> torch.Tensor:
        """The sum in pieces of fixed shape; all else is operations that round correctly, one by one."""
        rows = x.reshape(-1, x.shape[-1]).float()
        squares = row_by_row(lambda piece: piece.square().sum(1, keepdim=True), rows)
        length = squares.add_(self._root_epsilon.square()).sqrt_()
        return (rows / length).mul_(self._root_weight).to(x.dtype).view(x.shape)


class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, computed in float32."""

    def __init__(self, weights: Weights, name: str, size: int, epsilon: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.bias = weights.tensor(f"{name}.bias", (size,))
        self.shape, self.epsilon = (size,), epsilon
        self._kernel = dispatch.kernel("layer_norm", weights.device) if dispatch.use_triton(weights.device) else None
        self._is_deterministic = weights.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.bias, self.epsilon)
        if self._is_deterministic:
            return row_by_row(self._norm, x)
        return self._norm(x)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.shape, self.weight, self.bias, self.epsilon)
