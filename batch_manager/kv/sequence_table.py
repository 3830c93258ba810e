"""Which blocks a sequence holds and how many tokens they have room for: one row per slot, columns of numpy."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import InternalError
from ..requests.llm_request import LlmRequest

_UNUSED = -1

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]


class SequenceTable:
    """Rows of the sequences that hold blocks. Rows and columns grow on demand.

    owners         [slots] the request a row belongs to, or None
    kv_lengths     [slots] tokens there is room for in the KV cache
    held           [slots] blocks
    last_blocks    [slots] blocks the sequence holds once its last token is there
    block_ids      [slots, blocks] in token order; entries past `held` are stale

    Entries are what changed in block_ids: slots, indices, block ids, each [u] int32.
    """

    def __init__(self) -> None:
        self.owners: list[LlmRequest | None] = []
        self.kv_lengths = np.zeros(0, np.int64)
        self.held = np.zeros(0, np.int64)
        self.last_blocks = np.zeros(0, np.int64)
        self.block_ids = np.full((0, 1), _UNUSED, np.int32)

    def has(self, request: LlmRequest) -> bool:
        slot = request.seq_slot
        return 0 <= slot < len(self.owners) and self.owners[slot] is request

    def slots_of(self, requests: Sequence[LlmRequest]) -> np.ndarray:
        """The rows of requests that all have one, [n].

        Raises InternalError.
        """
        slots = [request.seq_slot for request in requests]
        in_range = not slots or max(slots) < len(self.owners)
        if not in_range or [self.owners[slot] for slot in slots] != list(requests):
            stranger = next(request for request in requests if not self.has(request))
            raise InternalError(f"{stranger} is to generate and holds no blocks")
        return np.fromiter(slots, np.intp, len(slots))

    def check_slots_are_free(self, requests: Sequence[LlmRequest]) -> None:
        """Raises InternalError when one of these requests could not be added."""
        taken = set()
        for request in requests:
            slot = request.seq_slot
            if slot < 0:
                raise InternalError(f"{request} has no slot")
            if slot in taken or (slot < len(self.owners) and self.owners[slot] is not None):
                raise InternalError(f"{request} starts in slot {slot}, which is taken")
            if request.beam_width != 1:
                raise InternalError(f"{request} has beam width {request.beam_width}", "the block tables hold one beam")
            taken.add(slot)

    def add(self, request: LlmRequest, block_ids: list[int], last_blocks: int) -> Entries:
        """A row for the whole prompt of a request."""
        slot, count = request.seq_slot, len(block_ids)
        self._make_room(slot + 1, count)
        self.owners[slot] = request
        self.kv_lengths[slot] = request.prompt_len
        self.held[slot] = count
        self.last_blocks[slot] = last_blocks
        self.block_ids[slot, :count] = block_ids
        return np.full(count, slot, np.int32), np.arange(count, dtype=np.int32), np.array(block_ids, np.int32)

    def add_block_each(self, slots: np.ndarray, block_ids: list[int]) -> Entries:
        """One more block for each of these rows."""
        indices = self.held[slots]
        self._make_room(len(self.owners), int(indices.max()) + 1)
        self.block_ids[slots, indices] = block_ids
        self.held[slots] += 1
        return slots.astype(np.int32), indices.astype(np.int32), np.array(block_ids, np.int32)

    def remove(self, request: LlmRequest) -> None:
        slot = request.seq_slot
        self.owners[slot] = None
        self.kv_lengths[slot] = self.held[slot] = self.last_blocks[slot] = 0

    def _make_room(self, rows: int, columns: int) -> None:
        more_rows, more_columns = _growth(len(self.owners), rows), _growth(self.block_ids.shape[1], columns)
        if more_rows:
            self.owners += [None] * more_rows
            self.kv_lengths = np.pad(self.kv_lengths, (0, more_rows))
            self.held = np.pad(self.held, (0, more_rows))
            self.last_blocks = np.pad(self.last_blocks, (0, more_rows))
        if more_rows or more_columns:
            self.block_ids = np.pad(self.block_ids, ((0, more_rows), (0, more_columns)), constant_values=_UNUSED)

    def faults(self) -> Iterator[str]:
        """Rows without an owner that are not empty, and owners that are in another row, in words."""
        for slot, owner in enumerate(self.owners):
            held, length, last = int(self.held[slot]), int(self.kv_lengths[slot]), int(self.last_blocks[slot])
            if owner is None and (held or length or last):
                yield f"slot {slot} has no owner, {held} of {last} blocks and {length} tokens"
            if owner is not None and owner.seq_slot != slot:
                yield f"slot {slot} belongs to {owner}, which is in slot {owner.seq_slot}"


def _growth(size: int, wanted: int) -> int:
    """How much to add, at least doubling, so that growing costs little in the long run."""
    return max(wanted, 2 * size) - size if wanted > size else 0
