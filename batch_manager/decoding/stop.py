"""Stop words of sequences without beams. The decoder checks end ids; the host checks lengths."""

import torch

from ..handover import NOT_FINISHED, STOP_WORDS, SlotSetup
from ..triton_kernels import dispatch
from .logits_rows import LogitsRows
from .slots import SlotState
from .word_lists import WordLists, has_longer_words


class StopWords:
    """Ends a sequence at the last token of a stop word, with the operation `match_stop_words`.

    The last token of the word must be sampled. The other tokens may be in the prompt, as in TensorRT-LLM. If a token
    ends a stop word and is an end id, the finish reason is END_ID. beam_stop_words.py serves sequences with beams,
    because a beam search must check all candidates.
    """

    def __init__(self, state: SlotState) -> None:
        self._match_stop_words = dispatch.kernel("match_stop_words", state.device)
        self._words = WordLists("stop_words", state)

    def is_active(self, setup: SlotSetup) -> bool:
        return bool(setup.stop_words) and not setup.has_beams

    def needs_history(self, setup: SlotSetup) -> bool:
        return has_longer_words(setup.stop_words)

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._words.put(slot, setup.stop_words if self.is_active(setup) else ())

    def mark(self, finish: torch.Tensor, tokens: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Return a copy of `finish` [r] uint8 with STOP_WORDS in the rows whose token in `tokens` [r] ends a stop word.

        Rows with another finish reason keep it.
        """
        ended = self._match_stop_words(tokens, *rows.history(), *self._words.lists_of(rows))
        return finish.masked_fill(ended & (finish == NOT_FINISHED), STOP_WORDS)
