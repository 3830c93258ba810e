"""What is done to a row of logits before a token is drawn from it, and in which order.

    0  post-processor       the user's own function, see logits_post_processors.py, or a grammar's bitmask, see
                            extras/guided_decoding.py: what it forbids (-inf) stays forbidden, what it raises or lowers
                            is then biased, penalised and heated like any logit
    1  bias                 embedding_bias, added to every token's logit
    2  penalties            repetition, then presence, then frequency: on all that the sequence holds, prompt included
    3  bans                 -inf: the end id before min_length, repeated n-grams, the last tokens of bad words
    4  temperature
    5  top-k; top-p in what top-k leaves; min-p in what that leaves
    6  the draw

The order is that of transformers. TensorRT-LLM divides by the temperature before the penalties; the two agree where the
temperature is 1. Log-probs are those of 0 to 4; logits that are returned are the model's own, before 0.

With beams 1 to 3 act on log-probabilities: 4 comes before them, then log_softmax, and what they leave is not made to
sum to one again before it is added to what came before. That is where transformers has its processors in beam search.
So a ban makes no other token more likely. Rows of those who ask for none of it are drawn from as they are;
`SlotSetup.changes_logits` says who asks, and a stage of your own has its say there.

4 to 6 are one operation, `sampling.sample` on a CPU and the kernel `sample_token` on a GPU, because a greedy row needs
none of the passes over the vocabulary that a sampled one does. 1 to 3 are objects of the protocol below; one that no
row of a step needs is skipped.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..handover import SlotSetup
from .bans import BadWords, MinLength, NgramBan
from .bias import EmbeddingBias
from .history import TokenHistory
from .penalties import TokenPenalties
from .slots import DrawRows


class LogitsStage(Protocol):
    """One change of logits. Holds its own state per slot; slots without that feature have neutral values."""

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """A sequence takes the slot; whatever was there before is gone."""
        ...

    def is_wanted(self, rows: DrawRows) -> bool:
        """Whether any of the rows needs this stage. Looks at the host's copy only."""
        ...

    def apply(self, logits: torch.Tensor, rows: DrawRows) -> None:
        """Change `logits` [r, vocab] float32 in place; row i belongs to rows.slots[i].

        Must not change anything that a second run of the step would notice.
        """
        ...


def wanted_stages(stages: Sequence[LogitsStage], rows: DrawRows) -> list[LogitsStage]:
    """Those that any of the rows needs, in order."""
    return [stage for stage in stages if stage.is_wanted(rows)]


def default_stages(num_slots: int, device: torch.device, history: TokenHistory) -> tuple[LogitsStage, ...]:
    """1 to 3, in order. They read the history, and leave it to others to keep it."""
    return (
        EmbeddingBias(num_slots, device),
        TokenPenalties(num_slots, device, history),
        MinLength(num_slots, device),
        NgramBan(num_slots, device, history),
        BadWords(num_slots, device, history),
    )
