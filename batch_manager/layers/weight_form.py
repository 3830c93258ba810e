"""Forms of a matrix that a layer multiplies rows with: what is stored, and how the device multiplies with it.

A form has `multiply(x)`, x [T, in] -> x W^T + b [T, out], and `add_product(residual, x)` -> residual + x W^T + b, which
may overwrite `residual`. It knows nothing of splits and adapters: those are the layer's.
"""

from typing import Protocol

import torch
from torch.nn import functional

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.cpu.deterministic_linear import NoAgreeingSizeError
from .context import LayerContext


class WeightForm(Protocol):
    """One matrix W [out, in] and its bias [out], or None. `shares_weight`: it holds the tensor it was made from."""

    shares_weight: bool

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b in a new tensor."""
        ...

    def add_product(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b, the sum rounded once where the form can. May overwrite `residual`."""
        ...


def make_weight_form(weight: torch.Tensor, bias: torch.Tensor | None, context: LayerContext) -> WeightForm:
    """The form that the device multiplies fastest with, among those that keep what `context` asks for."""
    on_triton = dispatch.use_triton(context.device)
    if context.deterministic:
        return RowWeight(weight if on_triton else _packed(weight), bias)     # the kernel takes it plain
    packed = _packed(weight)
    return PlainWeight(weight, bias) if packed is weight else PackedWeight(packed, bias)


class PlainWeight:
    """The matrix as it is; torch's products."""

    shares_weight = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def add_product(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._bias is not None:
            residual.add_(self._bias)
        return residual.addmm_(x, self._weight.t())


class PackedWeight:
    """The matrix packed for oneDNN, 1.5 to 2.4 times as fast on a CPU as multiplying with the plain one."""

    shares_weight = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        # The overloads themselves: looking them up again takes a tenth of a small product's time.
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._weight, self._bias, "none", [], "")

    def add_product(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, residual, self._weight, self._bias, "add")


class RowWeight:
    """A plain or packed matrix, in products whose bits, row by row, depend on that row alone.

    The product is rounded before it is added to a residual.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._kernel = dispatch.kernel("deterministic_linear", weight.device)
        self.shares_weight = not weight.is_mkldnn

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self._kernel(x, self._weight, self._bias)
        except NoAgreeingSizeError as fault:
            raise ConfigError(f"deterministic was asked for, and on this machine {fault}",
                              "the same bits wherever a row stands",
                              "try another dtype or num_threads, or leave deterministic out") from fault

    def add_product(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.multiply(x))


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight packed for oneDNN where that is possible and pays, else the weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)
