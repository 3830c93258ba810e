"""Build the native backend around a model that computes nothing, to measure the host's part of a step."""

from types import SimpleNamespace

import torch

from ..models.loading import LoadedModel
from ..runtime import layouts
from ..runtime.native_backend import NativeBackend

NUM_LOGITS = 8    # per row; few, because sampling from a whole vocabulary is the work of a device


class StubModel:
    """A model that computes nothing: hidden states are [tokens, 1], and token 0 has the largest logit in each row."""

    def __init__(self) -> None:
        self._logits = torch.empty(0, NUM_LOGITS, dtype=torch.float32, device="cpu")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1, dtype=torch.float32, device="cpu")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: "StubAttention") -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > len(self._logits):
            self._logits = torch.zeros(len(hidden), NUM_LOGITS, dtype=torch.float32, device="cpu")
            self._logits[:, 0] = 1
        return self._logits[: len(hidden)]


class StubAttention:
    """The attention of a StubModel. The backend calls `plan`, which does nothing, and the model runs no attention."""

    dispatch = "torch"

    def plan(self, step: object) -> None:
        return None


def native_backend_without_a_model(*, vocab_size: int, max_seq_len: int, num_blocks: int, tokens_per_block: int,
                                   num_slots: int) -> NativeBackend:
    """Return a CPU backend that packs, uploads, samples, stores and reads back, without computing a model.

    vocab_size   prompts may have token ids below this number; the model has only NUM_LOGITS logits
    """
    device = torch.device("cpu")
    spec = SimpleNamespace(vocab_size=vocab_size, hidden_size=1, architecture="StubModel")
    pool = torch.zeros(num_blocks, 1, 2, 1, tokens_per_block, 1, dtype=torch.float32, device=device)
    loaded = LoadedModel(spec, StubModel(), 0, device, torch.float32)
    return NativeBackend(loaded, StubAttention(), pool, layout=layouts.fused, num_slots=num_slots,
                         max_seq_len=max_seq_len)
