"""Bounds on how many blocks sequences will hold. A plan that reserves this many blocks never runs out of blocks.

The bound exceeds the number of blocks that the lengths imply, for three reasons:

1. A prompt is stored whole before any of its blocks leaves the window.
2. A sliding sequence takes its next block before it releases the oldest one.
3. A sequence that slides past a shared block takes a new block, but the shared block does not become free.

With drafts, a step takes several blocks at once, and blocks that a rewind could need are kept.
"""

from collections.abc import Sequence

import numpy as np

from ..requests.llm_request import LlmRequest
from . import block_needs
from .block_pool import BlockPool
from .sequence_table import UNUSED, SequenceTable
from .window import AttentionWindow


class Reservations:
    """Computes reservations for started sequences, and for a sequence that is about to start."""

    def __init__(self, sequences: SequenceTable, window: AttentionWindow, pool: BlockPool, with_reuse: bool) -> None:
        self._sequences = sequences
        self._window = window
        self._pool = pool
        self._with_reuse = with_reuse

    @property
    def max_draft_len(self) -> int:
        """The largest number of draft tokens that a step can add to a sequence."""
        return self._window.max_draft_len

    def to_start(self, request: LlmRequest, draft_len: int = 0) -> int:
        """Number of blocks for the whole prompt and `draft_len` draft tokens."""
        return block_needs.blocks_of_prompt(request.prompt_len + draft_len, self._window.tokens_per_block,
                                            request.beam_width, own_last=self._with_reuse)

    def to_start_with_drafts(self, request: LlmRequest) -> int:
        """Number of blocks for the whole prompt and for as many draft tokens as window and pool allow."""
        blocks = self.to_start(request)
        if not (self._window.max_draft_len and request.draft_len):
            return blocks
        drafts = min(request.draft_len, max(self._window.size + request.max_new_tokens - request.prompt_len, 0))
        return max(blocks, min(self.to_start(request, drafts), self._pool.num_blocks))

    def most_blocks(self, request: LlmRequest, *, with_pauses: bool = False) -> int:
        """The largest number of blocks that a sequence holds at a time, if it shares no blocks.

        with_pauses   whether the sequence may be paused. After a pause, its output is part of its prompt. A prompt
                      is stored whole, so a sliding window saves no blocks for such a sequence
        """
        window = self._window.without_sliding if with_pauses else self._window
        return block_needs.most_blocks(request.prompt_len, request.max_new_tokens, window, request.beam_width,
                                       own_last=self._with_reuse)

    def of_owners(self, requests: Sequence[LlmRequest]) -> int:
        """Number of blocks that started requests may still take, if each block that leaves a window becomes free."""
        return self._of_slots(self._sequences.slots_of(requests))

    def of_all_owners(self) -> int:
        """Number of blocks that all sequences together may still take.

        A sequence that slides past a shared block takes a new block, but the shared block does not become free. The
        number includes these new blocks.
        """
        reserved = self._of_slots(self._sequences.taken_slots())
        if self._slides_shared:
            kept, dropped = self._holders()
            reserved += int(np.maximum(dropped - 1 + (kept > 0), 0)[dropped > 0].sum())
        return reserved

    def kept_blocks(self) -> set[int] | None:
        """Return the ids of the blocks that at least one sequence holds until the sequence ends.

        Returns None if there is no sliding window or no block reuse.
        """
        if not (self._window.slides and self._with_reuse):
            return None
        kept, _ = self._holders()
        return set(np.flatnonzero(kept).tolist())

    def kept_columns(self, request: LlmRequest) -> int:
        """Index of the first block that a sequence of the request holds until the sequence ends.

        The output is assumed to have max_new_tokens tokens. 0 without a sliding window.
        """
        if not self._window.slides:
            return 0
        return int(self._window.num_dropped(request.prompt_len + request.max_new_tokens))

    @property
    def _slides_shared(self) -> bool:
        return self._window.slides and self._with_reuse and self._pool.extra_owners > 0

    def _of_slots(self, slots: np.ndarray) -> int:
        sequences, window = self._sequences, self._window
        last, ends, beams = sequences.last_blocks[slots], sequences.ends[slots], sequences.beam_widths[slots]
        remaining = (last - ends) * beams
        if window.slides:
            held = ends - sequences.dropped[slots]
            most = np.minimum(last, window.most_held)
            for index in np.flatnonzero(beams > 1).tolist():
                owner = sequences.owners[slots[index]]
                held[index] = len(set(sequences.table(owner).ravel().tolist()) - {UNUSED})
                most[index] = block_needs.blocks_with_last_one(
                    owner.prompt_len, owner.max_new_tokens, window, owner.beam_width, own_last=self._with_reuse)
            tokens: int | np.ndarray = 1 + window.max_draft_len
            if window.max_draft_len:    # no block leaves the window between a last chunk and the step after it
                tokens += window.max_draft_len * np.array([sequences.owners[slot].is_context
                                                           for slot in slots.tolist()], np.int64)
            next_step = sequences.new_blocks(slots, tokens) * beams
            remaining = np.minimum(remaining, np.maximum(most - held, next_step))
        return int(remaining.sum())

    def _holders(self) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each block, how many sequences keep it until their end, and how many will slide past it.

        Reads the first beam only, because sequences share only prompt blocks, which all beams have in common.
        """
        kept, dropped = (np.zeros(self._pool.num_blocks, np.int64) for _ in range(2))
        for slot in self._sequences.taken_slots().tolist():
            owner = self._sequences.owners[slot]
            row = self._sequences.table(owner)[0]
            first_kept = self.kept_columns(owner)
            kept[row[first_kept:]] += 1
            leaving = row[:first_kept]
            dropped[leaving[leaving >= 0]] += 1
        return kept, dropped
