"""Stores stop words or bad words of all slots on the device, in the kernels' format. A word is a list of tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from .logits_rows import LogitsRows
from .slots import SlotState

Words = Sequence[Sequence[int]]
SMALLEST_HEAP = 1024


class WordLists:
    """A list of words for the sequence in each slot.

    All lists share one tensor on the device, the heap. Each list has the format of `packed`. When a slot is set up
    again, its old list leaves a gap. When the heap is full, the current lists are copied to a new heap. Two columns of
    SlotState have the start of each list and its number of words.

    name   prefix of the names of these two columns
    """

    def __init__(self, name: str, state: SlotState) -> None:
        self._start, self._count = f"{name}_start", f"{name}_count"
        self._state = state
        self._state.add_columns([self._start, self._count], neutral=0)
        self._lists: dict[int, np.ndarray] = {}         # slot -> its packed list
        self._heap = torch.zeros(0, dtype=torch.int32, device=state.device)
        self._heap_used = 0

    def put(self, slot: int, words: Words) -> None:
        """Set the words of the sequence in a slot; the list may be empty."""
        self._lists.pop(slot, None)
        if words:
            self._lists[slot] = packed(words)
            self._state.put(slot, **{self._start: self._store(slot), self._count: len(words)})

    def lists_of(self, rows: LogitsRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (tensor of all lists, start of each row's list in it [r], number of words in each row's list [r])."""
        return self._heap, rows.column(self._start), rows.column(self._count)

    def longest_list(self, rows: LogitsRows) -> int:
        """Return the number of words in the longest list of these rows."""
        return int(self._state.host[self._count][rows.slots].max())

    def _store(self, slot: int) -> int:
        """Write a slot's list to the heap, the tensor of all lists. Returns the list's first index in the heap."""
        array = self._lists[slot]
        if self._heap_used + len(array) > len(self._heap):
            self._move(slot)
        start, self._heap_used = self._heap_used, self._heap_used + len(array)
        self._heap[start : self._heap_used] = self._state.send([array])[0]
        return start

    def _move(self, newcomer: int) -> None:
        """Copy the lists of all slots except `newcomer` to a new heap (the tensor of all lists).

        The new heap has room for the list of the slot `newcomer`.
        """
        size = sum(len(array) for array in self._lists.values())
        self._heap = torch.zeros(max(2 * size, SMALLEST_HEAP), dtype=torch.int32, device=self._heap.device)
        self._heap_used = 0
        for slot, array in self._lists.items():
            if slot != newcomer:
                self._state.put(slot, **{self._start: self._heap_used})
                self._heap_used += len(array)
        if moved := [array for slot, array in self._lists.items() if slot != newcomer]:
            self._heap[: self._heap_used] = self._state.send([np.concatenate(moved)])[0]


def has_longer_words(words: Words) -> bool:
    """Whether any word has several tokens. Matching such a word requires the tokens of the sequence."""
    return any(len(word) > 1 for word in words)


def packed(words: Words) -> np.ndarray:
    """Return one int32 array: the end of each word in the flattened tokens, then the flattened tokens."""
    ends = np.cumsum([len(word) for word in words])
    return np.concatenate([ends, [token for word in words for token in word]]).astype(np.int32)
