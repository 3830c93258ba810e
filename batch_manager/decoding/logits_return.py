"""Returned logits, for requests that asked for them: the model's logits before any stage, as float32 on the host."""

from collections.abc import Callable

import numpy as np
import torch

from .logits_rows import LogitsRows
from .slots import GENERATION_LOGITS

ROWS_AT_ONCE = 256         # context rows projected at a time; bounds the extra memory for a long prompt


def context_logits(project: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor,
                   vocab_size: int) -> np.ndarray:
    """Return logits [n, vocab] float32 for the hidden states [n, hidden size] of one context chunk."""
    logits = torch.empty((len(hidden), vocab_size), dtype=torch.float32, device="cpu")
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        logits[start : start + ROWS_AT_ONCE] = project(hidden[start : start + ROWS_AT_ONCE])
    return logits.numpy()


def generation_logits(logits: torch.Tensor, rows: LogitsRows) -> tuple[list[int], torch.Tensor]:
    """Return (slots of the q rows that asked for logits, a copy of these rows [q, vocab])."""
    asked = np.flatnonzero(rows.active(GENERATION_LOGITS))
    (device_asked,) = rows.send([asked])
    return rows.slots[asked].tolist(), logits[device_asked]


def logits_by_slot(slots: list[int], logits: np.ndarray) -> dict[int, np.ndarray]:
    """Return slot -> rows of `logits` [q, vocab] that belong to the slot. The rows of a slot are contiguous."""
    by_slot, start = {}, 0
    while start < len(slots):
        stop = start + 1
        while stop < len(slots) and slots[stop] == slots[start]:
            stop += 1
        by_slot[slots[start]] = logits[start:stop]
        start = stop
    return by_slot
