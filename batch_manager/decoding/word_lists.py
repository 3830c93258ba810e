"""Lists of words, where a word is a few tokens, where kernels find them."""

from collections.abc import Sequence

import numpy as np
import torch

from .logits_rows import LogitsRows
from .slots import SlotState

Words = Sequence[Sequence[int]]
SMALLEST_HEAP = 1024


class WordLists:
    """A list of words per slot.

    All lists lie one after the other in one tensor of the device, each as `packed` makes it, and stay where they are
    until room runs out; then the lists of today move to a new one. Where a slot's list is stands in two columns of the
    slots' state.

    name   begins the names of these columns
    """

    def __init__(self, name: str, state: SlotState) -> None:
        self._start, self._count = f"{name}_start", f"{name}_count"
        self._state = state
        self._state.add_columns([self._start, self._count], neutral=0)
        self._lists: dict[int, np.ndarray] = {}         # slot -> what is packed
        self._heap = torch.zeros(0, dtype=torch.int32, device=state.device)
        self._heap_used = 0

    def put(self, slot: int, words: Words) -> None:
        """A sequence takes the slot with its list, which may be empty."""
        self._lists.pop(slot, None)
        if words:
            self._lists[slot] = packed(words)
            self._state.put(slot, **{self._start: self._store(slot), self._count: len(words)})

    def lists_of(self, rows: LogitsRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(all lists, where each row's starts [r], its number of words [r])."""
        return self._heap, rows.column(self._start), rows.column(self._count)

    def longest_list(self, rows: LogitsRows) -> int:
        """The most words that a row has."""
        return int(self._state.host[self._count][rows.slots].max())

    def _store(self, slot: int) -> int:
        """Put a slot's list on the heap. Returns where."""
        array = self._lists[slot]
        if self._heap_used + len(array) > len(self._heap):
            self._move(slot)
        start, self._heap_used = self._heap_used, self._heap_used + len(array)
        self._heap[start : self._heap_used] = torch.from_numpy(array)
        return start

    def _move(self, newcomer: int) -> None:
        """Begin a new heap with each list but the newcomer's, for which there is room."""
        size = sum(len(array) for array in self._lists.values())
        self._heap = torch.zeros(max(2 * size, SMALLEST_HEAP), dtype=torch.int32, device=self._heap.device)
        self._heap_used = 0
        for slot, array in self._lists.items():
            if slot != newcomer:
                self._state.put(slot, **{self._start: self._heap_used})
                self._heap[self._heap_used : self._heap_used + len(array)] = torch.from_numpy(array)
                self._heap_used += len(array)


def has_longer_words(words: Words) -> bool:
    """Whether any word has several tokens, so that the tokens before it matter."""
    return any(len(word) > 1 for word in words)


def packed(words: Words) -> np.ndarray:
    """The exclusive ends of the words in their flattened tokens, then these tokens. int32"""
    ends = np.cumsum([len(word) for word in words])
    return np.concatenate([ends, [token for word in words for token in word]]).astype(np.int32)
