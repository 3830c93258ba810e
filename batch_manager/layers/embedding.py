"""Token embeddings and the head that maps hidden states back to tokens."""

from functools import partial
from math import frexp

import torch
from torch.nn import functional

from ..triton_kernels.cpu.fixed_pieces import elementwise
from ..triton_kernels.cpu.native.matrix import PackedMatrix
from ..weights.source import Weights
from .context import LayerContext
from .recording import LookedUp, NotRecordableError, Positions, Rows
from .weight_form import is_compiled, make_weight_form


class Embedding:
    """Rows by index.

    name        of the tensor, whole: "model.embed_tokens.weight". A Linear takes the prefix before `.weight`
    scale       what the rows are multiplied with, rounded to the context's dtype first; None: nothing
    first_row   of the stored tensor, which has `rows` from there on: index 0 is that one
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, rows: int, size: int,
                 scale: float | None = None, first_row: int = 0) -> None:
        context.refuse(f"Embedding {name}", "split")
        self.name = name
        self.weight = weights.tensor(name, (first_row + rows, size))[first_row:]
        self._scale = None if scale is None else torch.tensor(scale, dtype=context.dtype, device=context.device)

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64 -> a new tensor [T, size]."""
        if isinstance(indices, Positions) and self._scale is None:
            return LookedUp(self.weight)
        rows = functional.embedding(indices, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)


class Head:
    """Logits, from the rows that need them only: in the dtype of the products, so that a vocabulary's width is written
    and read once; in float32 with a softcap, which is computed in that.

    name      of the tensor, whole: "lm_head.weight". A Linear takes the prefix before `.weight`
    tied_to   an embedding whose tensor it shares, except where products want a packed one: then it holds a copy
    softcap   logits become softcap * tanh(logits / softcap); None: they stay as they are
    scale     logits are multiplied with it, before a softcap; None: they are not
    bias      a number is added to each logit, from the tensor `.bias` beside that of `name`
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, rows: int, size: int,
                 tied_to: Embedding | None = None, softcap: float | None = None, scale: float | None = None,
                 bias: bool = False) -> None:
        context.refuse(f"Head {name}", "split")
        biases = weights.tensor(f"{name.removesuffix('.weight')}.bias", (rows,)) if bias else None
        if tied_to is None:
            weight = weights.tensor(name, (rows, size))
        else:
            weights.tied(name, tied_to.name)
            weight = tied_to.weight
        # The compiled step has its own copy of the matrix, and a power of two changes no digit of it.
        if scale is not None and is_compiled(weight, context) and frexp(scale)[0] == 0.5:
            weight, biases, scale = weight * scale, None if biases is None else biases * scale, None
        form = make_weight_form(weight, biases, context)
        if tied_to is not None and not form.shares_weight:
            weights.count_copy(tied_to.weight.nbytes)
        self._multiply, self._multiply_arguments, self.softcap = form.multiply, form.multiply_arguments, softcap
        self._matrix, self._rows, self._scale = form.matrix, rows, scale
        if isinstance(form.matrix, PackedMatrix):    # its sums are float32 before they are rounded: they need not be
            self._multiply_arguments = (torch.float32,)
        # In pieces: a vector loop's tail rounds otherwise, and torch's threads would get in the way of those of the
        # compiled step.
        in_pieces = context.device.type == "cpu" and (context.deterministic or context.compiled_step)
        self._tanh = partial(elementwise, torch.tanh) if in_pieces else torch.tanh

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [r, size] -> [r, rows], a new tensor."""
        if isinstance(hidden, Rows):
            if self._scale is not None:
                raise NotRecordableError("its head scales the logits")
            logits = hidden.multiplied(self._matrix, self._rows)
        else:
            logits = self._multiply(hidden, *self._multiply_arguments)
        if self._scale is not None:
            logits = logits.mul_(self._scale)
        return logits if self.softcap is None else self._tanh(logits.float().div_(self.softcap)).mul_(self.softcap)
