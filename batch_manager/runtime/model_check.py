"""Checks the results of a model during the warm-up, because a user's class may return anything."""

import torch

from ..attention.interface import Attention
from ..errors import ConfigError, type_name
from ..models.registry import Model


class CheckedModel:
    """Wraps a model and checks its results against the description in models.registry.Model.

    vocab_size, hidden_size   sizes in the model's spec
    dtype                     dtype of the weights; each result has this dtype or float32
    Raises                    ConfigError, from `embed`, `forward` and `logits`
    """

    def __init__(self, model: Model, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._model, self._vocab_size, self._hidden_size = model, vocab_size, hidden_size
        self._dtypes = dict.fromkeys((dtype, torch.float32))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._checked("embed", self._model.embed(token_ids), token_ids, self._hidden_size, self._dtypes)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        found = self._model.forward(hidden, positions, attention)
        return self._checked("forward", found, positions, self._hidden_size, self._dtypes)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._checked("logits", self._model.logits(hidden), hidden, self._vocab_size, self._dtypes)

    def _checked(self, method: str, found: object, given: torch.Tensor, columns: int,
                 dtypes: dict[torch.dtype, None]) -> torch.Tensor:
        """Return `found` if it is a tensor of the expected shape, dtype and device. Otherwise, raises ConfigError."""
        shape = (len(given), columns)
        if (isinstance(found, torch.Tensor) and found.shape == shape and found.dtype in dtypes
                and found.device == given.device):
            return found
        what = f"a value of type {type_name(found)}"
        if isinstance(found, torch.Tensor):
            what = f"a tensor of shape {list(found.shape)} and dtype {_name(found.dtype)} on {found.device}"
        raise ConfigError(f"{type_name(self._model)}.{method} returned {what}",
                          f"expected a tensor of shape {list(shape)} and dtype {' or '.join(map(_name, dtypes))} on "
                          f"{given.device}", "correct the model's class, or the spec that it reads")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
