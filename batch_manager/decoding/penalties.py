"""Tokens that a sequence holds are made less likely, or more."""

import numpy as np
import torch

from ..handover import SlotSetup
from ..triton_kernels import dispatch
from .history import TokenHistory
from .slot_table import SlotTable
from .slots import DrawRows, penalizes

SMALLEST, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


class TokenPenalties:
    """Repetition, presence and frequency penalty on prompt and generated tokens. A LogitsStage.

    The meaning is that of the kernel `token_penalties` and its oracle; on a CPU it is carried out row by row.
    """

    def __init__(self, num_slots: int, device: torch.device, history: TokenHistory) -> None:
        self._history = history
        self._table = SlotTable(num_slots, device, repetition=np.float32(1), presence=np.float32(0),
                                frequency=np.float32(0))
        self._kernel = dispatch.kernel("token_penalties", device) if dispatch.use_triton(device) else None

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._table.put(slot, penalizes(setup), repetition=max(setup.sampling.repetition_penalty, SMALLEST),
                        presence=setup.sampling.presence_penalty, frequency=setup.sampling.frequency_penalty)

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._table.is_wanted(rows)

    def apply(self, logits: torch.Tensor, rows: DrawRows) -> None:
        if self._kernel is not None:
            self._kernel(logits, self._history.up_to_longest(rows), self._history.device_rows_of(rows),
                         rows.device_positions, *(self._table.column(name, rows) for name in self._table.host))
            return
        history_rows, logits = self._history.rows_of(rows), logits.numpy()
        host, vocab_size = self._table.host, logits.shape[1]
        for row in self._table.indices(rows).tolist():
            slot = rows.slots[row]
            tokens = self._history.of_row(int(history_rows[row]), int(rows.positions[row]))
            if tokens.max() >= vocab_size:              # virtual tokens of a prompt table have no logit
                tokens = tokens[tokens < vocab_size]
            penalize(logits[row], tokens, host["repetition"][slot], host["presence"][slot], host["frequency"][slot])


def penalize(logits: np.ndarray, tokens: np.ndarray, repetition: np.float32, presence: np.float32,
             frequency: np.float32) -> None:
    """Change the logits [vocab] of `tokens` [n], which may repeat. What was finite stays finite."""
    before = logits[tokens]                             # as often as the token occurs, each time the same
    with np.errstate(over="ignore", invalid="ignore"):
        after = np.where(before < 0, before * repetition, before / repetition)
        after -= presence
        if frequency != 0:
            after -= frequency * np.bincount(tokens)[tokens].astype(np.float32)
    if not np.isfinite(after).all():
        after = np.where(np.isfinite(before), np.nan_to_num(after, nan=-LARGEST), before)
    logits[tokens] = after
