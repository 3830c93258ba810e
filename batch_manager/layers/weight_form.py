"""Chooses how the weight matrix of a layer is stored and multiplied.

A layer calls the functions in its WeightForm directly. The layer itself handles its ports: processes and adapters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.cpu.deterministic_linear import NoAgreeingSizeError
from ..triton_kernels.cpu.native.library import QUANTISED_TYPES
from ..triton_kernels.cpu.native.library import TYPES as COMPILED_TYPES
from ..triton_kernels.cpu.native.matrix import (
    BLOCK,
    PackedMatrix,
    PanelMatrix,
    QuantisedMatrix,
    QuantisedPanels,
    padded_inputs,
    quantised_rows,
)
from ..weights.matrices import Blocks, Dense, StoredMatrix
from ..weights.source import Weights
from .context import LayerContext
from .levels_matrix import LEVEL_TYPES, LevelsMatrix

# A value of TrtGptModelOptionalParams.quantization -> type of the blocks: each 32 inputs of an output have a scale, a
# half float, and levels of 8 or 4 bits.
QUANTIZATIONS: Mapping[str, str] = {"int8": "Q8_0", "int4": "Q4_0"}
BYTES_OF_BLOCK = {"int8": 34, "int4": 18}
LARGEST_WEIGHT = {"int8": 127 * 65504.0, "int4": 7 * 65504.0}           # whose scale is a finite half float
QUANTISED_AT_ONCE = 2**20            # numbers


@dataclass(frozen=True, slots=True)
class WeightForm:
    """A stored form of a matrix W [out, in] and a bias b [out] or None: two functions and their fixed arguments.

    multiply        multiply(x, *multiply_arguments) -> x W^T + b in a new tensor; x [T, in]
    add_product     add_product(x, residual, *add_arguments) -> residual + x W^T + b. May overwrite `residual`. The sum
                    is rounded once if the form supports it
    shares_weight   whether the form uses the tensor that it was made from, without a copy
    matrix          the matrix for the recording of a step: a PanelMatrix for a CompiledForward, a Dense one for
                    kernel launches; None, or a LevelsMatrix: the form cannot be recorded
    """

    multiply: Callable[..., torch.Tensor]
    multiply_arguments: tuple[Any, ...]
    add_product: Callable[..., torch.Tensor]
    add_arguments: tuple[Any, ...]
    shares_weight: bool
    matrix: PanelMatrix | LevelsMatrix | Dense | None = None


def is_compiled(stored: StoredMatrix, context: LayerContext) -> bool:
    """Whether `make_weight_form` copies the matrix to a PackedMatrix, for the compiled step."""
    return context.compiled_step and isinstance(stored, Dense) and stored.weight.dtype in COMPILED_TYPES


def is_copied(context: LayerContext) -> bool:
    """Whether `make_weight_form` copies a Dense matrix in the context's dtype, to pack it."""
    return not dispatch.use_triton(context.device) and (
        context.compiled_step and context.dtype in COMPILED_TYPES or _is_packed(context.device, context.dtype))


def types_kept(context: LayerContext) -> Collection[str]:
    """Return the types of quantised blocks that layers multiply as a file has them."""
    if context.split.size > 1:                         # blocks do not end where the part of a process does
        return ()
    if context.compiled_step and context.dtype in COMPILED_TYPES:
        return QUANTISED_TYPES
    # With `deterministic` a row's sum has one order; that of the kernel depends on the number of rows.
    return LEVEL_TYPES if dispatch.use_triton(context.device) and not context.deterministic else ()


def quantised_bytes(quantization: str, num_weights: int) -> int:
    """Return the size of weights in blocks, without padding."""
    return num_weights * BYTES_OF_BLOCK[quantization] // BLOCK


def quantised(stored: Dense, quantization: str, weights: Weights) -> StoredMatrix:
    """Return the matrix in blocks, as a GGUF file would have them. They are written when they are read. A matrix with a
    weight that has no finite scale is returned as it is.

    quantization   a key of QUANTIZATIONS
    weights        the source that counted the matrix
    """
    kind, weight = QUANTIZATIONS[quantization], stored.weight
    if weight.is_meta:                                     # which only counts
        weights.count_copy(quantised_bytes(quantization, len(weight) * padded_inputs(weight.shape[1])) - weight.nbytes)
        return stored
    if not weight.abs().max() <= LARGEST_WEIGHT[quantization]:            # NaN, too
        return stored
    outputs, inputs = weight.shape

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = max(1, QUANTISED_AT_ONCE // inputs)
        for first in range(0, outputs, step):
            rows = quantised_rows(_read_by_compiled_code(weight[first : first + step]), kind)
            weights.count_copy(rows.nbytes)
            yield np.arange(first, first + len(rows)), rows

    weights.count_copy(-weight.nbytes)
    return Blocks([(kind, outputs)], inputs, read, stored.bias)


def _read_by_compiled_code(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.cpu()
    return weight if weight.dtype in COMPILED_TYPES else weight.float()


def make_weight_form(stored: StoredMatrix, context: LayerContext) -> WeightForm:
    """Return the form that `context.weight_form` chooses, or the fastest form that satisfies the options."""
    chosen = None if context.weight_form is None else context.weight_form(stored, context)
    if chosen is not None:
        return chosen
    return next(form for maker in _MAKERS[type(stored)] if (form := maker(stored, context)) is not None)


def _plain(stored: Dense, context: LayerContext) -> WeightForm:
    """Return the form that multiplies the unchanged matrix with torch."""
    weight, bias = stored.weight, stored.bias
    return WeightForm(functional.linear, (weight, bias), _add_dense_product, (weight.t(), bias), shares_weight=True,
                      matrix=stored)


def _add_dense_product(x: torch.Tensor, residual: torch.Tensor, transposed: torch.Tensor,
                       bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(x, transposed)


def _in_panels(stored: Dense, context: LayerContext) -> WeightForm | None:
    """Return the form of a matrix that is packed for the compiled step, see recording.py."""
    if not is_compiled(stored, context):
        return None
    matrix = PackedMatrix(stored.weight, stored.bias, context.deterministic)
    return WeightForm(matrix.multiply, (), matrix.add_product, (), shares_weight=False, matrix=matrix)


def _in_blocks(stored: Blocks, context: LayerContext) -> WeightForm:
    """Return the form of a matrix that keeps the blocks of its file, for compiled code or for kernels."""
    if not context.compiled_step:
        return form_of(LevelsMatrix(stored, context.device, context.dtype))
    panels = QuantisedPanels(stored.types, stored.in_size, stored.read())
    return form_of(QuantisedMatrix(panels, context.dtype, stored.bias, stored.factor,
                                   context.quantized_activations is not None))


def form_of(matrix: QuantisedMatrix | LevelsMatrix) -> WeightForm:
    return WeightForm(matrix.multiply, (), matrix.add_product, (), shares_weight=True, matrix=matrix)


def _in_one_dnn(stored: Dense, context: LayerContext) -> WeightForm | None:
    """Return the form of a matrix packed for oneDNN, 1.5 to 2.4 times as fast on a CPU as the plain form."""
    packed = stored.weight if dispatch.use_triton(context.device) else _packed(stored.weight)
    if packed is stored.weight:
        return None
    # Use the overloads directly: their lookup takes a tenth of the time of a small product.
    product = torch.ops.mkldnn._linear_pointwise
    return WeightForm(product.default, (packed, stored.bias, "none", [], ""), product.binary,
                      (packed, stored.bias, "add"), shares_weight=False)


def _row_by_row(stored: Dense, context: LayerContext) -> WeightForm | None:
    """Return the deterministic form of a plain or packed matrix: an output row depends on its input row only.

    The product is rounded before it is added to a residual.
    """
    if not context.deterministic:
        return None
    # The kernel needs an unpacked weight.
    weight = stored.weight if dispatch.use_triton(context.device) else _packed(stored.weight)
    bias = stored.bias
    kernel = dispatch.kernel("deterministic_linear", weight.device)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        try:
            return kernel(x, weight, bias)
        except NoAgreeingSizeError as fault:
            raise ConfigError(f"deterministic is set, but on this machine {fault}",
                              "expected the same bits at every row index",
                              "try another dtype or num_threads, or turn deterministic off") from fault

    def add_product(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(multiply(x))

    return WeightForm(multiply, (), add_product, (), shares_weight=not weight.is_mkldnn)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight packed for oneDNN if packing is supported and faster, else the weight."""
    return torch.ops.mkldnn._reorder_linear_weight(weight) if _is_packed(weight.device, weight.dtype) else weight


def _is_packed(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# Type of a stored matrix -> makers of its forms. The first maker that returns a form decides.
_MAKERS: Mapping[type[StoredMatrix], Sequence[Callable[[Any, LayerContext], WeightForm | None]]] = {
    Dense: (_in_panels, _row_by_row, _in_one_dnn, _plain), Blocks: (_in_blocks,)}
