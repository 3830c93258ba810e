"""Linear maps. What is stored is a form of weight_form.py; split and adapters are ports of the context."""

from collections.abc import Sequence
from typing import Literal

import torch

from ..errors import ConfigError
from ..weights.source import Weights
from .context import LayerContext
from .recording import Rows
from .weight_form import make_weight_form

Split = Literal["columns", "rows"]


class Linear:
    """y = x W^T + b, over one or several stacked projections of the checkpoint.

    names        prefixes whose `.weight` and `.bias` are stacked, in order: "lm_head", not "lm_head.weight"
    sizes        rows of each; several sizes with one name are projections that the checkpoint stores as one tensor
    row_order    the rows as they are to be computed, by their places in the stored tensors; None: as they are stored
    scale        the outputs are multiplied with it: the weights and biases are, as they are loaded; None: they are not
    transposed   the checkpoint stores [in, out] (GPT-2's Conv1D); one name then
    split        how the map divides among processes: "columns", each has a share of every projection's outputs; "rows",
                 each has a share of the inputs, and the products are summed; None: every process has all of it. In one
                 process it changes nothing
    """

    def __init__(self, weights: Weights, context: LayerContext, names: Sequence[str], in_size: int,
                 sizes: Sequence[int], *, bias: bool = False, transposed: bool = False,
                 split: Split | None = None, row_order: torch.Tensor | None = None,
                 scale: float | None = None) -> None:
        if split not in (None, "columns", "rows"):
            raise ConfigError(f"Linear(split={split!r}) of {names[0]}", "'columns', 'rows' or None",
                              "correct the model's class")
        context.refuse(f"Linear {names[0]}", "split", "adapters")
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> a new tensor [T, out]."""
        if isinstance(x, Rows):
            return x.multiplied(self._matrix, self._outputs)
        return self._multiply(x, *self._multiply_arguments)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b, the sum rounded once (with a deterministic context the product before it too).

        May overwrite `residual`. Faster than adding the result of a call.
        """
        if isinstance(x, Rows):
            return x.multiplied(self._matrix, self._outputs, adds_to=residual)
        return self._add_product(x, residual, *self._add_arguments)
