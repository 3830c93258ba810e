"""Tokens that may not be drawn now: their logit becomes -inf.

    the end id            before min_length tokens were generated
    repeated n-grams      the token that would end a sequence of n tokens which the prompt or the output holds already
    bad words             the last token of a word whose other tokens are the last ones of the sequence
"""

import numpy as np
import torch

from ..handover import SlotSetup
from ..triton_kernels import dispatch
from .history import TokenHistory
from .slot_table import SlotTable
from .slots import DrawRows
from .word_lists import WordLists


class MinLength:
    """Bans the end id while the output is too short. A LogitsStage."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        # The position from which the end id is allowed.
        self._table = SlotTable(num_slots, device, end_id=np.int64(0), allowed_from=np.int64(0))

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._table.put(slot, setup.sampling.min_length > 0 and setup.end_id >= 0, end_id=setup.end_id,
                        allowed_from=setup.prompt_length + setup.sampling.min_length)

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._table.is_wanted(rows) and len(self._too_short(rows)) > 0

    def apply(self, logits: torch.Tensor, rows: DrawRows) -> None:
        too_short = self._too_short(rows)
        end_ids = self._table.host["end_id"][rows.slots[too_short]]
        logits[torch.from_numpy(too_short).to(logits.device), torch.from_numpy(end_ids).to(logits.device)] = -torch.inf

    def _too_short(self, rows: DrawRows) -> np.ndarray:
        having = self._table.having(rows)
        return np.nonzero(having & (rows.positions < self._table.host["allowed_from"][rows.slots]))[0]


class NgramBan:
    """Bans repeated n-grams. A LogitsStage; the meaning is that of the kernel `ban_ngrams` and its oracle."""

    def __init__(self, num_slots: int, device: torch.device, history: TokenHistory) -> None:
        self._history = history
        self._table = SlotTable(num_slots, device, size=np.int32(0))
        self._kernel = dispatch.kernel("ban_ngrams", device) if dispatch.use_triton(device) else None

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._table.put(slot, setup.sampling.no_repeat_ngram_size > 0, size=setup.sampling.no_repeat_ngram_size)

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._table.is_wanted(rows)

    def apply(self, logits: torch.Tensor, rows: DrawRows) -> None:
        if self._kernel is not None:
            self._kernel(logits, self._history.up_to_longest(rows), self._history.device_rows_of(rows),
                         rows.device_positions, self._table.column("size", rows))
            return
        history_rows, logits = self._history.rows_of(rows), logits.numpy()
        for row in self._table.indices(rows).tolist():
            tokens = self._history.of_row(int(history_rows[row]), int(rows.positions[row]))
            banned = repeating_tokens(tokens, int(self._table.host["size"][rows.slots[row]]))
            logits[row, banned[banned < logits.shape[1]]] = -np.inf


def repeating_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """The tokens behind which `tokens` [n] would end in a sequence of `size` tokens that it holds already."""
    others = size - 1
    if len(tokens) < size:
        return tokens[:0]
    last = tokens[len(tokens) - others :]
    starts = np.arange(len(tokens) - others)
    for offset in range(others - 1, -1, -1):
        starts = starts[tokens[starts + offset] == last[offset]]
        if not len(starts):
            break
    return tokens[starts + others]


class BadWords:
    """Bans the last tokens of bad words. A LogitsStage; the meaning is that of the kernel `ban_words`."""

    def __init__(self, num_slots: int, device: torch.device, history: TokenHistory) -> None:
        self._history = history
        self._kernel = dispatch.kernel("ban_words", device) if dispatch.use_triton(device) else None
        self._words = WordLists(num_slots, device, in_kernel=self._kernel is not None)

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._words.put(slot, setup.bad_words)

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._words.is_wanted(rows)

    def apply(self, logits: torch.Tensor, rows: DrawRows) -> None:
        if self._kernel is not None:
            self._kernel(logits, self._history.tokens, self._history.device_rows_of(rows), rows.device_positions,
                         *self._words.for_kernel(rows))
            return
        history_rows, logits = self._history.rows_of(rows), logits.numpy()
        for row in self._words.indices(rows).tolist():
            tokens = self._history.of_row(int(history_rows[row]), int(rows.positions[row]))
            logits[row, self._words.last_tokens(int(rows.slots[row]), tokens)] = -np.inf
