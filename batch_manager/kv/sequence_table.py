"""The table of sequences: blocks and lengths in NumPy columns with one row per slot."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import InternalError, counted
from ..requests.llm_request import LlmRequest

UNUSED = -1

_NO_SLOTS = np.empty(0, np.intp)

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]


class SequenceTable:
    """The blocks and lengths of all sequences. The table grows on demand. Beam b of slot s is row
    s * max_beam_width + b of `block_ids`.

    owners         [slots] the request of a slot, or None
    kv_lengths     [slots] number of tokens for which room in the KV cache is claimed
    ends           [slots] number of blocks per beam for `kv_lengths` tokens, dropped blocks included
    dropped        [slots] number of blocks per beam that were released because they left the attention window
    last_blocks    [slots] number of blocks per beam at the largest length of the sequence, dropped blocks included
    beam_widths    [slots] number of beams of the owner, each in a row of `block_ids`; 0 without an owner
    reused_tokens  slot -> number of prompt tokens of its request that were cached when the request started
    block_ids      [slots * max_beam_width, blocks] in token order; UNUSED for dropped blocks. In each row, the values
                   from index `ends` on are stale

    `Entries` describe changes of `block_ids`: three int32 arrays of rows, indices and block ids, with one element for
    each changed entry.
    """

    def __init__(self, tokens_per_block: int, max_beam_width: int = 1) -> None:
        self.tokens_per_block = tokens_per_block
        self.max_beam_width = max_beam_width
        self.owners: list[LlmRequest | None] = []
        self.kv_lengths = np.zeros(0, np.int64)
        self.ends = np.zeros(0, np.int64)
        self.dropped = np.zeros(0, np.int64)
        self.last_blocks = np.zeros(0, np.int64)
        self.beam_widths = np.zeros(0, np.int64)
        self.reused_tokens: dict[int, int] = {}
        self.block_ids = np.full((0, 1), UNUSED, np.int32)
        self._last_requests: list[LlmRequest] = []
        self._last_slots = _NO_SLOTS

    # Reading.

    def has(self, request: LlmRequest) -> bool:
        slot = request.seq_slot
        return 0 <= slot < len(self.owners) and self.owners[slot] is request

    def held(self, request: LlmRequest) -> int:
        """Number of blocks that each beam of the request holds."""
        return int(self.ends[request.seq_slot] - self.dropped[request.seq_slot])

    def num_mentions(self) -> int:
        """Number of used entries of `block_ids`, over all sequences."""
        return int(((self.ends - self.dropped) * self.beam_widths).sum())

    def table(self, request: LlmRequest) -> np.ndarray:
        """The request's rows of block_ids, as a view [beams, blocks]. Entries of dropped blocks are UNUSED."""
        first = request.seq_slot * self.max_beam_width
        return self.block_ids[first:first + request.beam_width, :self.ends[request.seq_slot]]

    def blocks_of_beam(self, request: LlmRequest, beam: int) -> list[int]:
        """The blocks of one beam, in token order."""
        row = self.table(request)[beam].tolist()
        return [block_id for block_id in row if block_id != UNUSED] if self.dropped[request.seq_slot] else row

    def owners_of(self, request: LlmRequest) -> Counter[int]:
        """Return block -> number of the request's beams that hold the block."""
        if not self.has(request):
            return Counter()
        beams = range(request.beam_width)
        return Counter(block_id for beam in beams for block_id in self.blocks_of_beam(request, beam))

    def slots_of(self, requests: Sequence[LlmRequest]) -> np.ndarray:
        """Return the slots of started requests, [n], read-only. Raises InternalError if a request holds no blocks.

        The table keeps the last result, because planning and claiming use the same requests.
        """
        if requests != self._last_requests:    # by identity
            self._last_slots = self.find_slots(requests)
            self._last_slots.flags.writeable = False
            self._last_requests = list(requests)
        return self._last_slots

    def find_slots(self, requests: Sequence[LlmRequest]) -> np.ndarray:
        """Return the slots of started requests, [n], as a new array that the caller may change.

        Raises InternalError if a request holds no blocks.
        """
        slots = [request.seq_slot for request in requests]
        in_range = not slots or max(slots) < len(self.owners)
        if not in_range or [self.owners[slot] for slot in slots] != list(requests):
            stranger = next(request for request in requests if not self.has(request))
            raise InternalError(f"{stranger} holds no blocks", "only started requests are extended or rewound")
        return np.array(slots, np.intp)

    def new_blocks(self, slots: np.ndarray, tokens: "int | np.ndarray" = 1) -> np.ndarray:
        """Return [n], the number of blocks per beam that each sequence takes for `tokens` more tokens, up to its final
        length."""
        grown = -(-(self.kv_lengths[slots] + tokens) // self.tokens_per_block)
        new: np.ndarray = np.minimum(grown, self.last_blocks[slots]) - self.ends[slots]
        return new

    def new_blocks_of(self, request: LlmRequest, tokens: int = 1) -> int:
        """Number of blocks that one sequence takes for `tokens` more tokens, over all its beams."""
        slot = request.seq_slot
        end, last = int(self.ends[slot]), int(self.last_blocks[slot])
        grown = -(-(int(self.kv_lengths[slot]) + tokens) // self.tokens_per_block)
        return (min(grown, last) - end) * request.beam_width

    def sum_of_new_blocks(self, slots: np.ndarray, tokens: "int | np.ndarray" = 1) -> int:
        """Number of blocks that these sequences together take for `tokens` more tokens each, over all their beams."""
        if isinstance(tokens, int) and tokens == 1:
            return self.num_beams(self.crossing(slots))
        if self.max_beam_width > 1:
            return int((self.new_blocks(slots, tokens) * self.beam_widths[slots]).sum())
        return int(self.new_blocks(slots, tokens).sum())

    def crossing(self, slots: np.ndarray) -> np.ndarray:
        """Return the slots whose next token needs a new block."""
        crossing: np.ndarray = slots[self.ends[slots] * self.tokens_per_block == self.kv_lengths[slots]]
        return crossing

    def taken_slots(self) -> np.ndarray:
        """The slots with an owner, [n]."""
        return np.flatnonzero(self.beam_widths)

    def check_slots_are_free(self, requests: Sequence[LlmRequest]) -> None:
        """Raise InternalError if any of these requests cannot be added."""
        taken = set()
        for request in requests:
            slot = request.seq_slot
            if slot < 0:
                raise InternalError(f"{request} has no slot")
            if slot in taken or (slot < len(self.owners) and self.owners[slot] is not None):
                raise InternalError(f"{request} starts in slot {slot}, which is taken")
            if request.beam_width > self.max_beam_width:
                raise InternalError(f"{request} has beam width {request.beam_width}",
                                    f"expected at most {self.max_beam_width}, the number of beams in a block table")
            taken.add(slot)

    # Changing.

    def add(self, request: LlmRequest, block_ids: list[int], last_blocks: int, private: int = 0) -> Entries:
        """Add a request with the blocks of its whole prompt. Returns the changed entries.

        block_ids     first the blocks that all beams share, in token order, then the `private` blocks
        last_blocks   number of blocks per beam when the sequence has its largest length
        private       number of blocks at the end of `block_ids` that belong to one beam each. It is the number of
                      beams, or 0 if the beams share all blocks
        """
        slot, beams = request.seq_slot, request.beam_width
        shared = len(block_ids) - private
        count = shared + (1 if private else 0)
        self._make_room(slot + 1, count)
        self.owners[slot] = request
        self.kv_lengths[slot] = request.prompt_len
        self.ends[slot] = count
        self.last_blocks[slot] = last_blocks
        self.beam_widths[slot] = beams
        first = slot * self.max_beam_width
        self.block_ids[first:first + beams, :shared] = block_ids[:shared]
        if private:
            self.block_ids[first:first + beams, shared] = block_ids[shared:]
        return self.entries(request)

    def entries(self, request: LlmRequest) -> Entries:
        """Return all used entries of the request's rows, as `Entries`."""
        table = self.table(request)
        beams, indices = np.nonzero(table != UNUSED)
        return ((beams + request.seq_slot * self.max_beam_width).astype(np.int32), indices.astype(np.int32),
                table[beams, indices])

    def num_beams(self, slots: np.ndarray) -> int:
        """Total number of beams in these slots."""
        return len(slots) if self.max_beam_width == 1 else int(self.beam_widths[slots].sum())

    def add_blocks(self, slots: np.ndarray, block_ids: list[int], counts: np.ndarray | None = None) -> Entries:
        """Append blocks to each beam in these slots. Returns the changed entries.

        counts      [n] blocks per beam; None: one each
        block_ids   ordered by slot, then by beam, then by token
        """
        rows, indices = slots, self.ends[slots]
        if counts is None:
            self._make_room(len(self.owners), int(indices.max()) + 1)
            self.ends[slots] += 1
        else:
            self._make_room(len(self.owners), int((indices + counts).max()))
            self.ends[slots] += counts
        if self.max_beam_width > 1:
            beams = self.beam_widths[slots]
            rows = np.repeat(slots * self.max_beam_width, beams) + _count_up(beams)
            indices = np.repeat(indices, beams)
            counts = None if counts is None else np.repeat(counts, beams)
        if counts is not None:
            rows = np.repeat(rows, counts)
            indices = np.repeat(indices, counts) + _count_up(counts)
        self.block_ids[rows, indices] = block_ids
        return rows.astype(np.int32), indices.astype(np.int32), np.array(block_ids, np.int32)

    def drop_up_to(self, slot: int, num_dropped: int, kept: int) -> list[list[int]]:
        """Drop the oldest blocks of a slot, except its first `kept` blocks.

        Afterwards `num_dropped` blocks per beam are dropped, including the blocks that earlier calls dropped. Returns
        the blocks of each beam that this call dropped.
        """
        first, width = slot * self.max_beam_width, self.beam_widths[slot]
        left = self.block_ids[first:first + width, kept + self.dropped[slot]:kept + num_dropped]
        gone: list[list[int]] = left.tolist()
        left[:] = UNUSED
        self.dropped[slot] = num_dropped
        return gone

    def remove(self, request: LlmRequest) -> None:
        slot = request.seq_slot
        self._last_requests, self._last_slots = [], _NO_SLOTS
        self.owners[slot] = None
        self.reused_tokens.pop(slot, None)
        for column in (self.kv_lengths, self.ends, self.dropped, self.last_blocks, self.beam_widths):
            column[slot] = 0

    def _make_room(self, slots: int, columns: int) -> None:
        more_slots, more_columns = _growth(len(self.owners), slots), _growth(self.block_ids.shape[1], columns)
        if more_slots:
            self.owners += [None] * more_slots
            for name in ("kv_lengths", "ends", "dropped", "last_blocks", "beam_widths"):
                setattr(self, name, np.pad(getattr(self, name), (0, more_slots)))
        if more_slots or more_columns:
            self.block_ids = np.pad(self.block_ids, ((0, more_slots * self.max_beam_width), (0, more_columns)),
                                    constant_values=UNUSED)

    def faults(self) -> Iterator[str]:
        """Describe slots without an owner that are not empty, and owners in the wrong slot."""
        for slot, owner in enumerate(self.owners):
            held, length = int(self.ends[slot] - self.dropped[slot]), int(self.kv_lengths[slot])
            last, beams = int(self.last_blocks[slot]), int(self.beam_widths[slot])
            if owner is None and (held or length or last or beams):
                yield (f"slot {slot} has no owner, but {held} of {last} blocks, {counted(length, 'token')} "
                       f"and {counted(beams, 'beam')}")
            if owner is not None and owner.seq_slot != slot:
                yield f"slot {slot} belongs to {owner}, which is in slot {owner.seq_slot}"


def _growth(size: int, wanted: int) -> int:
    """Number of rows or columns to add to `size` existing ones, so that there are at least `wanted`.

    Growth at least doubles the size, which makes it cheap on average.
    """
    return max(wanted, 2 * size) - size if wanted > size else 0


def _count_up(counts: np.ndarray) -> np.ndarray:
    """Concatenate 0, 1, ..., count - 1 for each count."""
    within: np.ndarray = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return within
