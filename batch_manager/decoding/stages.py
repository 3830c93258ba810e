"""What is done to a row of logits before a token is drawn from it, and in which order.

    0  post-processor       the user's own function, see logits_post_processors.py, or a grammar's bitmask, see
                            extras/guided_decoding.py: what it forbids (-inf) stays forbidden, what it raises or lowers
                            is then biased, penalised and divided by the temperature like any logit
    1  bias                 embedding_bias, added to every token's logit
    2  penalties            repetition, then presence, then frequency: on all that the sequence holds, prompt included;
                            presence and frequency without its first prompt_ignore_length tokens
    3  bans                 -inf: the end id before min_length, repeated n-grams, the last tokens of bad words
    4  stages of your own   Parts.stages, in the order in which they are given
    5  temperature
    6  top-k; top-p, as it has decayed, in what top-k leaves; min-p in what that leaves
    7  sampling the token

The order is that of transformers. TensorRT-LLM divides by the temperature before the penalties; the two agree where the
temperature is 1. Log-probs are those of 0 to 5; logits that are returned are the model's own, before 0.

With beams 1 to 4 act on log-probabilities: 5 comes before them, then log_softmax, and what they leave is not made to
sum to one again before it is added to what came before. That is where transformers has its processors in beam search.
So a ban makes no other token more likely. Beams for which no stage is active are sampled from as they are.

5 to 7 are one operation, `sample_token`, because a greedy row needs none of the passes over the vocabulary that a
sampled one does. 1 to 4 are objects of logits_stage.py; one that is active for no row of a step is skipped. A new
number for one is a row of SamplingConfig, a file with the stage that names it in `reads`, and a line in
`default_stages`.
"""

from collections.abc import Sequence

import torch

from ..handover import SlotSetup
from .bans import BadWords, MinLength, NgramBan
from .bias import EmbeddingBias
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage
from .penalties import TokenPenalties
from .slots import MAX_STAGES, SlotState
from .top_p_decay import TopPDecay


def default_stages(state: SlotState, own: Sequence[LogitsStage] = ()) -> tuple[LogitsStage, ...]:
    """1 to 4, in order, then the stage that knows the top-p of 6."""
    device = state.device
    return (
        EmbeddingBias(device),
        TokenPenalties(device),
        MinLength(state),
        NgramBan(device),
        BadWords(state),
        *own,
        TopPDecay(state),
    )


class Stages:
    """The stages of a decoder. Each has a bit of `SlotState.features`, and columns for the numbers that it reads.

    raised_last   the stage that raised last, when it was set up or applied; None: none did
    """

    def __init__(self, stages: Sequence[LogitsStage], state: SlotState) -> None:
        assert len(stages) <= MAX_STAGES
        self.raised_last: LogitsStage | None = None
        self._by_bit = [(1 << place, stage) for place, stage in enumerate(stages)]
        self._decay = [(bit, stage) for bit, stage in self._by_bit if isinstance(stage, TopPDecay)]
        self._changing = sum(bit for bit, stage in self._by_bit if not isinstance(stage, TopPDecay))
        for stage in stages:
            state.add_columns(stage.reads)

    def set_up(self, slot: int, setup: SlotSetup) -> tuple[int, bool]:
        """A sequence takes the slot. Returns the bits of the stages that are active for it, and whether any of these
        needs its tokens."""
        bits, needs_history = 0, False
        try:
            for bit, stage in self._by_bit:
                stage.set_up(slot, setup)
                if stage.is_active(setup):
                    bits |= bit
                    needs_history = needs_history or bool(stage.needs_history(setup))
        except Exception:
            self.raised_last = stage
            raise
        return bits, needs_history

    def changes(self, rows: LogitsRows) -> bool:
        """Whether a stage is active that may change logits."""
        return rows.features & self._changing != 0

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Change `logits` [r, vocab] float32 in place."""
        try:
            for bit, stage in self._by_bit:
                if rows.features & bit:
                    stage.apply(logits, rows, rows.active(bit))
        except Exception:
            self.raised_last = stage
            raise

    def keep(self, rows: LogitsRows, sampled: torch.Tensor) -> None:
        """Tokens that were sampled are those of their sequences from now on. sampled [r]"""
        for bit, stage in self._decay:
            if rows.features & bit:
                stage.keep(rows, sampled)
