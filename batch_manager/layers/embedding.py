"""Token embeddings and the head that maps hidden states back to tokens."""

import torch
from torch.nn import functional

from ..weights.source import Weights
from .linear import pack, row_product


class Embedding:
    """Rows by index."""

    def __init__(self, weights: Weights, name: str, rows: int, size: int) -> None:
        self.name = name
        self.weight = weights.tensor(name, (rows, size))

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        return functional.embedding(indices, self.weight)


class Head:
    """Logits in float32, from the rows that need them only.

    A head tied to the embedding shares its tensor, except where products want a packed one: then it holds a copy.
    """

    def __init__(self, weights: Weights, name: str, rows: int, size: int, tied_to: Embedding | None = None) -> None:
        if tied_to is None:
            self.weight = pack(weights.tensor(name, (rows, size)), weights.deterministic)
        else:
            weights.tied(name, tied_to.name)
            self.weight = pack(tied_to.weight, weights.deterministic)
            if self.weight is not tied_to.weight:
                weights.num_bytes += tied_to.weight.nbytes
        self._by_row = row_product(self.weight) if weights.deterministic else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._by_row is not None:
            return self._by_row(hidden).float()
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(hidden, self.weight, None, "none", [], "").float()
        return functional.linear(hidden, self.weight).float()
