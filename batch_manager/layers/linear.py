"""Linear layers. weight_form.py decides how the weight is stored and multiplied; context.py has the ports."""

from collections.abc import Sequence
from typing import Literal

import torch

from ..errors import ConfigError
from ..weights.source import Weights
from .context import AdapterModule, LayerContext
from .recording import Rows
from .weight_form import WeightForm, make_weight_form

SplitDimension = Literal["columns", "rows"]


class Linear:
    """y = x W^T + b, for one projection of the checkpoint or several stacked ones.

    names        prefixes whose `.weight` and `.bias` are stacked, in order: "lm_head", not "lm_head.weight"
    sizes        number of outputs of each projection; several sizes with one name are projections that the checkpoint
                 stores as one tensor
    row_order    permutation of the stacked rows of W: output i uses row row_order[i]; None: stored order
    scale        factor on the outputs, applied to weight and bias when they are loaded; None: no factor
    transposed   the checkpoint stores [in, out] (GPT-2's Conv1D); requires a single name
    split        how tensor parallelism splits the layer. "columns": each process has a share of the outputs of every
                 projection. "rows": each process has a share of the inputs, and the results are summed. None: every
                 process has the whole layer. No effect with one process
    """

    def __init__(self, weights: Weights, context: LayerContext, names: Sequence[str], in_size: int,
                 sizes: Sequence[int], *, bias: bool = False, transposed: bool = False,
                 split: SplitDimension | None = None, row_order: torch.Tensor | None = None,
                 scale: float | None = None) -> None:
        if split not in (None, "columns", "rows"):
            raise ConfigError(f"Linear {names[0]} has split={split!r}", "expected 'columns', 'rows' or None", "")
        if context.split.size > 1:
            raise ConfigError(f"LayerContext.split has {context.split.size} processes for Linear {names[0]}",
                              "this version supports only one", "leave split out")
        self.names, self.split = tuple(names), split
        rows = sizes if len(names) == len(sizes) else [sum(sizes)]
        stored = list(zip(names, rows, strict=True))
        if transposed:
            ((name, size),) = stored
            weight = weights.tensor(f"{name}.weight", (in_size, size)).t().contiguous()
        else:
            weight = weights.stacked([(f"{name}.weight", (size, in_size)) for name, size in stored])
        biases = weights.stacked([(f"{name}.bias", (size,)) for name, size in stored]) if bias else None
        if row_order is not None:
            weight, biases = weight[row_order], None if biases is None else biases[row_order]
        if scale is not None:
            weight, biases = weight * scale, None if biases is None else biases * scale
        form = make_weight_form(weight, biases, context)
        self._matrix, self._outputs = form.matrix, sum(sizes)
        self._multiply, self._multiply_arguments = form.multiply, form.multiply_arguments
        self._add_product, self._add_arguments = form.add_product, form.add_arguments
        adapter = None if context.adapters is None else context.adapters.of(self.names, in_size, sizes)
        if adapter is not None:
            self._multiply, self._add_product = self._with_adapter, self._add_with_adapter
            self._multiply_arguments = self._add_arguments = (form, adapter)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b for x [T, in] as a new tensor [T, out]."""
        if isinstance(x, Rows):
            return x.multiplied(self._matrix, self._outputs)
        return self._multiply(x, *self._multiply_arguments)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b. May overwrite `residual`. Faster than adding the layer's output to `residual`.

        The sum is rounded only once if the WeightForm supports this and the layer is not deterministic. Otherwise the
        product is also rounded, before the addition.
        """
        if isinstance(x, Rows):
            return x.multiplied(self._matrix, self._outputs, adds_to=residual)
        return self._add_product(x, residual, *self._add_arguments)

    def _with_adapter(self, x: torch.Tensor, form: WeightForm, adapter: AdapterModule) -> torch.Tensor:
        y = form.multiply(x, *form.multiply_arguments)
        adapter.add(y, x)
        return y

    def _add_with_adapter(self, x: torch.Tensor, residual: torch.Tensor, form: WeightForm,
                          adapter: AdapterModule) -> torch.Tensor:
        return residual.add_(self._with_adapter(x, form, adapter))
