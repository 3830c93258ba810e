"""A stage of a model in place of a whole model: hidden states come from the stage before, and go to the stage after."""

from typing import Any

import torch

from ...attention.interface import Attention
from ...models.decoder import Stage
from .exchange import Exchange


class StagedModel:
    """A registry.Model that is one of several stages, which run on different ranks.

    model      the layers of the stage, with the embedding on the first stage, and the norm and the head on the last one

    splits_head   whether the ranks of this stage divide the head, so that all of them compute logits
    """

    def __init__(self, model: Any, stage: Stage, exchange: Exchange) -> None:
        self._model, self._stage, self._exchange = model, stage, exchange
        self.prompt_tuning_scale = getattr(model, "prompt_tuning_scale", 1)
        self.splits_head = getattr(model, "head", None) is not None and model.head.is_split

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings on the first stage, and the hidden states of the stage before on a later one."""
        return self._model.embed(token_ids) if self._stage.is_first else self._exchange.receive(len(token_ids))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        hidden = self._model.forward(hidden, positions, attention)
        if not self._stage.is_last:
            self._exchange.send(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        if self.splits_head:
            self._exchange.end_part()
        return logits
