"""Forms of a matrix that a layer multiplies rows with: what is stored, and how the device multiplies with it.

A layer calls the operations of its form itself, so that nothing stands between the layer and the device's library. A
form knows nothing of splits and adapters: those are the layer's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.cpu.deterministic_linear import NoAgreeingSizeError
from ..triton_kernels.cpu.native.library import TYPES as COMPILED_TYPES
from ..triton_kernels.cpu.native.matrix import PackedMatrix
from .context import LayerContext


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One matrix W [out, in] and its bias b [out], or None, as two operations and what these are always given.

    multiply        multiply(x, *multiply_arguments) -> x W^T + b in a new tensor; x [T, in]
    add_product     add_product(x, residual, *add_arguments) -> residual + x W^T + b, the sum rounded once where the
                    form can. May overwrite `residual`
    shares_weight   the form holds the tensor it was made from
    matrix          what recorded steps multiply with: a PackedMatrix where they are compiled, a PlainMatrix where they
                    are launched; None: this form is none of theirs
    """

    multiply: Callable[..., torch.Tensor]
    multiply_arguments: tuple[Any, ...]
    add_product: Callable[..., torch.Tensor]
    add_arguments: tuple[Any, ...]
    shares_weight: bool
    matrix: "PackedMatrix | PlainMatrix | None" = None


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """weight [out, in] contiguous, bias [out] or None: in the dtype of the rows, on their device."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def is_compiled(weight: torch.Tensor, context: LayerContext) -> bool:
    """Whether the compiled step multiplies with a matrix of this dtype, and so with a copy of it."""
    return context.compiled_step and not context.deterministic and weight.dtype in COMPILED_TYPES


def make_weight_form(weight: torch.Tensor, bias: torch.Tensor | None, context: LayerContext) -> WeightForm:
    """The form that the device multiplies fastest with, among those that keep what `context` asks for."""
    context.refuse("a matrix", "weight_form")
    on_triton = dispatch.use_triton(context.device)
    if context.deterministic:
        return _row_by_row(weight if on_triton else _packed(weight), bias)     # the kernel takes it plain
    if is_compiled(weight, context):
        return _in_panels(PackedMatrix(weight, bias))
    packed = weight if on_triton else _packed(weight)
    return _plain(weight, bias) if packed is weight else _in_one_dnn(packed, bias)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> WeightForm:
    """The matrix as it is; torch's products."""
    return WeightForm(functional.linear, (weight, bias), _add_plain_product, (weight.t(), bias), shares_weight=True,
                      matrix=PlainMatrix(weight, bias))


def _add_plain_product(x: torch.Tensor, residual: torch.Tensor, transposed: torch.Tensor,
                       bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(x, transposed)


def _in_panels(matrix: PackedMatrix) -> WeightForm:
    """The matrix as the compiled step multiplies with it."""
    return WeightForm(matrix.multiply, (), matrix.add_product, (), shares_weight=False, matrix=matrix)


def _in_one_dnn(packed: torch.Tensor, bias: torch.Tensor | None) -> WeightForm:
    """The matrix packed for oneDNN, 1.5 to 2.4 times as fast on a CPU as multiplying with the plain one."""
    # The overloads themselves: looking them up again takes a tenth of a small product's time.
    product = torch.ops.mkldnn._linear_pointwise
    return WeightForm(product.default, (packed, bias, "none", [], ""), product.binary, (packed, bias, "add"),
                      shares_weight=False)


def _row_by_row(weight: torch.Tensor, bias: torch.Tensor | None) -> WeightForm:
    """A plain or packed matrix, in products whose bits, row by row, depend on that row alone.

    The product is rounded before it is added to a residual.
    """
    kernel = dispatch.kernel("deterministic_linear", weight.device)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        try:
            return kernel(x, weight, bias)
        except NoAgreeingSizeError as fault:
            raise ConfigError(f"deterministic was asked for, and on this machine {fault}",
                              "the same bits wherever a row stands",
                              "try another dtype or num_threads, or leave deterministic out") from fault

    def add_product(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(multiply(x))

    return WeightForm(multiply, (), add_product, (), shares_weight=not weight.is_mkldnn)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight packed for oneDNN where that is possible and pays, else the weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)
