"""Lists of words, where a word is a few tokens, and which of them the end of a sequence has begun."""

from collections.abc import Sequence

import numpy as np
import torch

from .slot_table import SlotTable
from .slots import DrawRows

Words = Sequence[Sequence[int]]
SMALLEST_HEAP = 1024


class WordLists:
    """A list of words per slot.

    For the host, words of one length are a matrix, which is compared with the end of a sequence at once. For kernels
    (`in_kernel`) all lists lie behind one another in one tensor of the device, each as `packed` makes it, and stay
    where they are until room runs out; then the lists of today move to a new one.
    """

    def __init__(self, num_slots: int, device: torch.device, in_kernel: bool) -> None:
        self._in_kernel = in_kernel
        self._table = SlotTable(num_slots, device, start=np.int32(0), count=np.int32(0))
        self._lists: dict[int, list[np.ndarray]] = {}           # slot -> matrices [words, length], or what is packed
        self._heap = torch.zeros(0, dtype=torch.int32, device=device)
        self._heap_used = 0

    def put(self, slot: int, words: Words) -> None:
        """A sequence takes the slot with its list, which may be empty."""
        self._lists.pop(slot, None)
        if words:
            self._lists[slot] = [packed(words)] if self._in_kernel else by_length(words)
        start = self._store(slot) if words and self._in_kernel else 0
        self._table.put(slot, bool(words), start=start, count=len(words))

    def is_wanted(self, rows: DrawRows) -> bool:
        return self._table.is_wanted(rows)

    def indices(self, rows: DrawRows) -> np.ndarray:
        """The rows that have words, rising."""
        return self._table.indices(rows)

    def last_tokens(self, slot: int, history: np.ndarray) -> np.ndarray:
        """[w] int32: the last tokens of the words whose other tokens are the end of `history` [n]."""
        found = []
        for words in self._lists[slot]:
            others = words.shape[1] - 1
            if others <= len(history):
                begun = (words[:, :-1] == history[len(history) - others :]).all(1)
                found.append(words[begun, -1])
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def for_kernel(self, rows: DrawRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """(all lists, where each row's starts [r], its number of words [r], the largest such number)."""
        most = int(self._table.host["count"][rows.slots].max())
        return self._heap, self._table.column("start", rows), self._table.column("count", rows), most

    def _store(self, slot: int) -> int:
        """Put a slot's list on the heap. Returns where."""
        (array,) = self._lists[slot]
        if self._heap_used + len(array) > len(self._heap):
            self._move(slot)
        start, self._heap_used = self._heap_used, self._heap_used + len(array)
        self._heap[start : self._heap_used] = torch.from_numpy(array)
        return start

    def _move(self, newcomer: int) -> None:
        """Begin a new heap with everybody's list but the newcomer's, for whom there is room."""
        size = sum(len(array) for (array,) in self._lists.values())
        self._heap = torch.zeros(max(2 * size, SMALLEST_HEAP), dtype=torch.int32, device=self._heap.device)
        self._heap_used = 0
        for slot, (array,) in self._lists.items():
            if slot != newcomer:
                self._table.put(slot, True, start=self._heap_used, count=int(self._table.host["count"][slot]))
                self._heap[self._heap_used : self._heap_used + len(array)] = torch.from_numpy(array)
                self._heap_used += len(array)


def by_length(words: Words) -> list[np.ndarray]:
    """The words of each length as the rows of a matrix, int32."""
    lengths = sorted({len(word) for word in words})
    return [np.array([word for word in words if len(word) == length], np.int32) for length in lengths]


def packed(words: Words) -> np.ndarray:
    """The exclusive ends of the words in their flattened tokens, then these tokens. int32"""
    ends = np.cumsum([len(word) for word in words])
    return np.concatenate([ends, [token for word in words for token in word]]).astype(np.int32)
