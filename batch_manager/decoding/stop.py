"""Whether a token ends its sequence by a stop word. End ids are the decoder's; lengths are counted by the host."""

import torch

from ..handover import NOT_FINISHED, STOP_WORDS, SlotSetup
from ..triton_kernels import dispatch
from .logits_rows import LogitsRows
from .slots import SlotState
from .word_lists import WordLists, has_longer_words


class StopWords:
    """Ends a sequence with the last token of a stop word: the operation `match_stop_words`.

    The word's last token is one that was sampled; the others may be of the prompt, as in TensorRT-LLM. An end id that
    is also the last token of a word ends the sequence as an end id. Those of beams are beam_stop_words.py's: the search
    wants to know of every candidate.
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
        """`finish` [r] uint8, with STOP_WORDS where `tokens` [r] end a word and nothing else ended the sequence."""
        ended = self._match_stop_words(tokens, *rows.history(), *self._words.lists_of(rows))
        return finish.masked_fill(ended & (finish == NOT_FINISHED), STOP_WORDS)
