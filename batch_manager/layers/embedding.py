"""Token embeddings, and the head that maps hidden states to logits."""

from dataclasses import replace
from functools import partial
from math import frexp

import torch
from torch.nn import functional

from ..triton_kernels.cpu.fixed_pieces import elementwise
from ..triton_kernels.cpu.native.matrix import PanelMatrix
from ..weights.matrices import WHOLE_MATRIX, Blocks, Dense, Share, StoredMatrix
from ..weights.source import Weights
from .context import LayerContext
from .recording import LookedUp, NotRecordableError, Positions, Rows
from .weight_form import WeightForm, form_of, is_compiled, make_weight_form


class Embedding:
    """An embedding table, whose rows are looked up by index.

    Several processes divide the table of the vocabulary, if their number divides it: each looks up its own rows, and
    the results are summed.

    name        full name of the tensor: "model.embed_tokens.weight". (`Linear` takes the prefix before `.weight`)
    scale       factor on the rows, rounded to the layer's dtype; None: no factor
    first_row   row of the stored tensor that index 0 refers to; the rows before it are not used
    is_kept     whether this is the table of the vocabulary. It may keep the quantised blocks of its file, in which it
                cannot be recorded

    weight      the table [rows, size], or this process's rows of it; None: it keeps its blocks, in `matrix`
    matrix      a QuantisedMatrix or LevelsMatrix whose outputs are the rows, or None
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, rows: int, size: int,
                 scale: float | None = None, first_row: int = 0, is_kept: bool = False) -> None:
        self.name, self.weight, self.matrix, self._split = name, None, None, None
        if is_kept and name.endswith(".weight"):
            self._own_rows, share = _part_of_vocabulary(rows, context)
            if share is not WHOLE_MATRIX:
                self._split, self._first_own = context.split, share.rank * self._own_rows
            stored = weights.linear([name.removesuffix(".weight")], size, [self._own_rows], share=share)
            if isinstance(stored, Blocks):
                self.matrix = make_weight_form(stored, context).matrix
            else:
                self.weight = stored.weight
        else:
            self.weight = weights.tensor(name, (first_row + rows, size))[first_row:]
        self._scale = None if scale is None else torch.tensor(scale, dtype=context.dtype, device=context.device)

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at indices [T] int64 as a new tensor [T, size]."""
        if isinstance(indices, Positions) and self._scale is None and self.weight is not None:
            return LookedUp(self.weight)
        if self._split is not None:
            own = indices - self._first_own
            is_other = (own < 0) | (own >= self._own_rows)
            rows = functional.embedding(own.masked_fill_(is_other, 0), self.weight)
            rows = self._split.sum(rows.masked_fill_(is_other[:, None], 0))
        elif self.matrix is None:
            rows = functional.embedding(indices, self.weight)
        elif isinstance(indices, Positions):
            raise NotRecordableError("the rows of its embedding are decoded when they are looked up")
        else:
            rows = self.matrix.rows(indices)
        return rows if self._scale is None else rows.mul_(self._scale)


class Head:
    """The projection of hidden states to logits.

    Logits have the dtype of the matrix product, to avoid another pass over the vocabulary. With a softcap they are
    float32.

    Several processes divide the vocabulary, if their number divides it: each computes its own logits, and gets those
    of the others. All of them call the head for the same rows.

    name      full name of the tensor: "lm_head.weight". (`Linear` takes the prefix before `.weight`)
    tied_to   an embedding whose tensor the head uses; None: the head uses the tensor `name`. The head copies the
              tensor of the embedding if the head needs a packed matrix; quantised blocks are shared
    softcap   replace logits by softcap * tanh(logits / softcap); None: no cap
    scale     factor on the logits, before the softcap; None: no factor
    bias      add the bias tensor whose name ends in `.bias` instead of `.weight`

    is_split  whether processes divide the vocabulary
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, rows: int, size: int,
                 tied_to: Embedding | None = None, softcap: float | None = None, scale: float | None = None,
                 bias: bool = False) -> None:
        rows, share = _part_of_vocabulary(rows, context)
        self.is_split, self._split = share is not WHOLE_MATRIX, context.split
        form, scale = _form_of_head(weights, context, name, rows, size, tied_to, scale, bias, share)
        self._multiply, self._multiply_arguments, self.softcap = form.multiply, form.multiply_arguments, softcap
        self._matrix, self._rows, self._scale = form.matrix, rows, scale
        if isinstance(form.matrix, PanelMatrix):    # return its float32 sums without rounding
            self._multiply_arguments = (torch.float32,)
        # In pieces, because the tail of a vectorized loop rounds differently, and because torch's threads would compete
        # with the threads of the compiled step.
        in_pieces = context.device.type == "cpu" and (context.deterministic or context.compiled_step)
        self._tanh = partial(elementwise, torch.tanh) if in_pieces else torch.tanh

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden [r, size] as a new tensor [r, rows]."""
        if isinstance(hidden, Rows):
            if self._scale is not None:
                raise NotRecordableError("its head scales the logits")
            logits = hidden.multiplied(self._matrix, self._rows)
        else:
            logits = self._multiply(hidden, *self._multiply_arguments)
        if self._scale is not None:
            logits = logits.mul_(self._scale)
        if self.softcap is not None:
            logits = self._tanh(logits.float().div_(self.softcap)).mul_(self.softcap)
        return self._split.gather(logits) if self.is_split else logits


def _part_of_vocabulary(rows: int, context: LayerContext) -> tuple[int, Share]:
    """Return the number of rows of this process, and its share. All rows if they cannot be divided equally."""
    split = context.split
    if split.size == 1 or rows % split.size:
        return rows, WHOLE_MATRIX
    return rows // split.size, Share(split.rank, split.size, "outputs")


def _form_of_head(weights: Weights, context: LayerContext, name: str, rows: int, size: int, tied_to: Embedding | None,
                  scale: float | None, bias: bool, share: Share) -> tuple[WeightForm, float | None]:
    """Return the form of a head's matrix, and the factor that is left to apply. See Head for the arguments."""
    prefix = name.removesuffix(".weight")
    if tied_to is not None:
        weights.tied(name, tied_to.name)
    stored: StoredMatrix
    if tied_to is None and name.endswith(".weight"):
        stored = weights.linear([prefix], size, [rows], bias=bias, share=share)
        added = stored.bias
    else:
        added = None
        if bias:
            first = share.rank * rows
            added = weights.tensor(f"{prefix}.bias", (share.size * rows,))[first:first + rows]
        if tied_to is None or tied_to.weight is not None:
            stored = Dense(weights.tensor(name, (rows, size)) if tied_to is None else tied_to.weight, added)
    scaled = added if scale is None or added is None else added * scale
    if tied_to is not None and tied_to.matrix is not None:
        return form_of(tied_to.matrix.sharing(scaled, scale or 1.0)), None
    if scale is not None and isinstance(stored, Blocks):
        return make_weight_form(replace(stored, bias=scaled, factor=scale), context), None
    # The compiled step has its own copy of the matrix, and scaling by a power of two is exact.
    if scale is not None and is_compiled(stored, context) and frexp(scale)[0] == 0.5:
        stored, scale = Dense(stored.weight * scale, scaled), None
    form = make_weight_form(stored, context)
    if tied_to is not None and not form.shares_weight:
        weights.count_copy(tied_to.weight.nbytes)
    return form, scale
