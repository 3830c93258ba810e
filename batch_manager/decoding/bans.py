"""Bans set the logits of forbidden tokens to -inf.

    end ids               are forbidden until min_length tokens are generated
    repeated n-grams      a token is forbidden if it would repeat an n-gram of the sequence
    bad words             the last token of a word is forbidden if the sequence ends with the word's other tokens

A ban subtracts infinity. NaN therefore stays and +inf becomes NaN, and the check for finite logits still finds them.
"""

import numpy as np
import torch

from ..handover import SlotSetup
from ..triton_kernels import dispatch
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage
from .slots import SlotState
from .word_lists import WordLists, has_longer_words


class MinLength(LogitsStage):
    """Bans the end ids until the output has min_length tokens."""

    reads = ("min_length", "end_id", "prompt_length")

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._more: dict[int, tuple[int, ...]] = {}     # slot -> end ids after the first; only non-empty ones

    def is_active(self, setup: SlotSetup) -> bool:
        return setup.sampling.min_length > 0 and setup.end_id >= 0

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._more.pop(slot, None)
        if setup.more_end_ids and self.is_active(setup):
            self._more[slot] = setup.more_end_ids

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        min_length, end_id, prompt_length = (self._state.host[name][rows.slots] for name in self.reads)
        too_short = np.nonzero(active & (rows.positions - prompt_length < min_length))[0]
        if len(too_short):
            end_ids = end_id[too_short].astype(np.int64)
            if self._more:
                more = [(row, token) for row in too_short.tolist()
                        for token in self._more.get(int(rows.slots[row]), ())]
                if more:
                    banned_rows, tokens = zip(*more)
                    too_short, end_ids = np.append(too_short, banned_rows), np.append(end_ids, tokens)
            at = tuple(rows.send([too_short, end_ids]))
            logits.index_put_(at, logits[at] - torch.inf)


class NgramBan(LogitsStage):
    """Bans repeated n-grams with the operation `ban_ngrams`."""

    reads = ("no_repeat_ngram_size",)

    def __init__(self, device: torch.device) -> None:
        self._ban_ngrams = dispatch.kernel("ban_ngrams", device)

    def needs_history(self, setup: SlotSetup) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        self._ban_ngrams(logits, *rows.history(), *rows.columns(self.reads))


class BadWords(LogitsStage):
    """Bans the last tokens of bad words with the operation `ban_words`."""

    def __init__(self, state: SlotState) -> None:
        self._ban_words = dispatch.kernel("ban_words", state.device)
        self._words = WordLists("bad_words", state)

    def is_active(self, setup: SlotSetup) -> bool:
        return bool(setup.bad_words)

    def needs_history(self, setup: SlotSetup) -> bool:
        return has_longer_words(setup.bad_words)

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._words.put(slot, setup.bad_words)

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        self._ban_words(logits, *rows.history(), *self._words.lists_of(rows), self._words.longest_list(rows))
