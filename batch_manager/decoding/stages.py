"""The changes made to a row of logits before a token is sampled, in order.

    0  post-processor       the user's function, see logits_post_processors.py, or a grammar's bitmask, see
                            extras/guided_decoding.py. Tokens that the post-processor forbids (-inf) stay forbidden.
                            Bias, penalties and temperature apply to the other logits, changed or not
    1  bias                 embedding_bias, added to the logits of all tokens
    2  penalties            repetition, then presence, then frequency, on prompt and output; presence and frequency
                            ignore the first prompt_ignore_length tokens
    3  bans                 -inf for the end ids until the output has min_length tokens, for tokens that would
                            repeat an n-gram, and for tokens that would complete a bad word
    4  custom stages        Parts.stages, in the order given
    5  temperature
    6  top-k; then top-p, after its decay, on the tokens that top-k keeps; then min-p on the tokens that top-p keeps
    7  sampling the token

The order is the same as in transformers. TensorRT-LLM divides by the temperature before the penalties; both orders give
the same result if the temperature is 1. Log-probs are computed after changes 0 to 5. Returned logits are the model's
logits before change 0.

With beams, changes 1 to 4 act on log-probabilities: change 5 and log_softmax come first. The results of changes 1 to 4
are not normalised again before they are added to the cumulative log-probabilities, as in the beam search of
transformers. A ban therefore makes no other token more likely. For beams without an active stage, `beam_topk` computes
the log-probabilities.

Changes 5 to 7 are one operation, `sample_token`, which makes fewer passes over the vocabulary for greedy rows. Changes
1 to 4 are instances of `LogitsStage`. A stage that is active for no row of a step is skipped.

A new parameter needs a field of SamplingConfig, a name in requests/tensor_attributes.py, a file with the stage that
lists the parameter in `reads`, and a line in `default_stages`.
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
    """Return the stages for changes 1 to 4 at the top of this file, in order, then the stage for the decay of top-p."""
    device = state.device
    return (
        EmbeddingBias(state),
        TokenPenalties(device),
        MinLength(state),
        NgramBan(device),
        BadWords(state),
        *own,
        TopPDecay(state),
    )


class Stages:
    """Sets up and applies the stages of a decoder, in order.

    In `SlotState`, each stage has one bit in `features`, and a column for each parameter that it reads.

    decaying      bits of the stages whose state depends on the sampled tokens
    raised_last   the stage that last raised, in `set_up` or `apply`; None: no stage raised
    """

    def __init__(self, stages: Sequence[LogitsStage], state: SlotState) -> None:
        assert len(stages) <= MAX_STAGES
        self.raised_last: LogitsStage | None = None
        self._by_bit = [(1 << index, stage) for index, stage in enumerate(stages)]
        self._decay = [(bit, stage) for bit, stage in self._by_bit if isinstance(stage, TopPDecay)]
        self.decaying = sum(bit for bit, _ in self._decay)
        self._changing = sum(bit for bit, stage in self._by_bit if not isinstance(stage, TopPDecay))
        for stage in stages:
            state.add_columns(stage.reads)

    def set_up(self, slot: int, setup: SlotSetup) -> tuple[int, bool]:
        """Set up a sequence in a slot, in all stages.

        Returns the bits of the stages that are active for the sequence, and whether one of them reads the tokens of
        the sequence.
        """
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

    def bits_of(self, stages: Sequence[LogitsStage]) -> int:
        return sum(bit for bit, stage in self._by_bit if any(stage is one for one in stages))

    def changes(self, rows: LogitsRows) -> bool:
        """Whether a stage that is active for a row may change its logits. False if only top-p decay is active."""
        return rows.features & self._changing != 0

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Apply the active stages to `logits` [r, vocab] float32, in place."""
        try:
            for bit, stage in self._by_bit:
                if rows.features & bit:
                    stage.apply(logits, rows, rows.active(bit))
        except Exception:
            self.raised_last = stage
            raise

    def keep(self, rows: LogitsRows, sampled: torch.Tensor) -> None:
        """Update the top-p of the rows with top-p decay after a step sampled the tokens `sampled` [r]."""
        for bit, stage in self._decay:
            if rows.features & bit:
                stage.keep(rows, sampled)
