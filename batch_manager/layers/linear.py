"""Linear layers. weight_form.py decides how the weight is stored and multiplied; context.py has the ports."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from ..errors import ConfigError
from ..weights.matrices import Dense, Share
from ..weights.source import Weights
from .context import AdapterModule, LayerContext, Split
from .recording import Rows
from .weight_form import WeightForm, make_weight_form, quantised

SplitDimension = Literal["columns", "heads", "rows"]

_SHARED: dict[SplitDimension | None, Literal["outputs", "inputs"] | None] = {
    "columns": "outputs", "heads": "outputs", "rows": "inputs", None: None}


class Linear:
    """y = x W^T + b, for one projection of the checkpoint or several stacked ones.

    names        prefixes whose `.weight` and `.bias` are stacked, in order: "lm_head", not "lm_head.weight"
    sizes        number of outputs of each projection; several sizes with one name are projections that the checkpoint
                 stores as one tensor
    row_order    permutation of the stacked rows of W, on the CPU: output i uses row row_order[i]; None: stored order,
                 or by_head
    scale        factor on the outputs, applied to weight and bias when they are loaded; None: no factor
    transposed   the checkpoint stores [in, out] (GPT-2's Conv1D)
    split        how tensor parallelism splits the layer. "columns": each process has a share of the outputs of every
                 projection. "heads": likewise, for the queries, keys and values of whole heads; several processes can
                 have the same keys and values. "rows": each process has a share of the inputs, and the results are
                 summed. None: every process has the whole layer. No effect with one process
    by_head      number of heads, if one tensor has all projections head after head: the first head's rows of each
                 projection, then those of the next head. None: projection after projection

    Sizes, row_order and scale are those of this process: with "columns" sizes, and with "rows" in_size, are the number
    in the checkpoint divided by the number of processes. With "heads", so are the sizes; those of keys and values are
    multiplied by the number of processes that have the same ones (`LayerContext.kv_copies`).

    matrix   the weight for recordings, see WeightForm
    """

    def __init__(self, weights: Weights, context: LayerContext, names: Sequence[str], in_size: int,
                 sizes: Sequence[int], *, bias: bool = False, transposed: bool = False,
                 split: SplitDimension | None = None, row_order: torch.Tensor | None = None,
                 scale: float | None = None, by_head: int | None = None) -> None:
        if split not in _SHARED:
            raise ConfigError(f"Linear {names[0]} has split={split!r}", "expected 'columns', 'heads', 'rows' or None",
                              "")
        self.names, self.split = tuple(names), split
        if by_head is not None:
            rows = torch.arange(sum(sizes), dtype=torch.int64, device="cpu").view(by_head, -1)
            row_order = torch.cat([part.flatten() for part in rows.split([size // by_head for size in sizes], 1)])
        copies = (1, context.kv_copies, context.kv_copies) if split == "heads" and context.kv_copies > 1 else None
        share = Share(context.split.rank, context.split.size, _SHARED[split], by_head is not None, copies)
        stored = weights.linear(names, in_size, sizes, bias=bias, transposed=transposed, row_order=row_order,
                                scale=scale, share=share)
        self._is_summed = split == "rows" and context.split.size > 1
        if self._is_summed and context.split.rank > 0:
            stored = replace(stored, bias=None)        # the first process adds it
        if context.quantization is not None and isinstance(stored, Dense):
            stored = quantised(stored, context.quantization, weights)
        form = make_weight_form(stored, context)
        self.matrix, self._outputs = form.matrix, sum(sizes)
        self._multiply, self._multiply_arguments = form.multiply, form.multiply_arguments
        self._add_product, self._add_arguments = form.add_product, form.add_arguments
        self._adapter = adapter = None if context.adapters is None else context.adapters.of(
            self.names, in_size, sizes, row_order=row_order, scale=scale, share=share)
        if adapter is not None or self._is_summed:
            self._multiply, self._add_product = self._with_ports, self._add_with_ports
            self._multiply_arguments = self._add_arguments = (form, adapter, context.split if self._is_summed else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b for x [T, in] as a new tensor [T, out]."""
        if isinstance(x, Rows):
            y = x.multiplied(self.matrix, self._outputs, adapter=self._adapter)
            return y.summed() if self._is_summed else y
        return self._multiply(x, *self._multiply_arguments)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b. May overwrite `residual`. Faster than adding the layer's output to `residual`.

        The sum is rounded only once if the WeightForm supports this and the layer is not deterministic. Otherwise the
        product is also rounded, before the addition.
        """
        if isinstance(x, Rows):
            if self._is_summed:
                return residual + self(x)
            return x.multiplied(self.matrix, self._outputs, adds_to=residual, adapter=self._adapter)
        return self._add_product(x, residual, *self._add_arguments)

    def _with_ports(self, x: torch.Tensor, form: WeightForm, adapter: AdapterModule | None, split: Split | None
                    ) -> torch.Tensor:
        y = form.multiply(x, *form.multiply_arguments)
        if adapter is not None:
            adapter.add(y, x)
        return y if split is None else split.sum(y)

    def _add_with_ports(self, x: torch.Tensor, residual: torch.Tensor, form: WeightForm, adapter: AdapterModule | None,
                        split: Split | None) -> torch.Tensor:
        if split is not None:
            return residual.add_(self._with_ports(x, form, adapter, split))
        y = form.add_product(x, residual, *form.add_arguments)
        adapter.add(y, x)
        return y
