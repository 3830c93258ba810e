"""The facade of this folder: claims and releases blocks, and gives the numbers that plans are made with."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InternalError
from ..handover import NO_UPDATES, BlockCopy, BlockTableUpdates
from ..requests.llm_request import LlmRequest
from . import block_needs, claims
from .block_pool import BlockPool
from .claims import Claim
from .estimates import Estimates
from .eviction import DEFAULT_PRIORITY
from .ledger import KvLedger
from .prefix_cache import PrefixCache
from .prefix_index import DIGEST_BITS
from .reservations import Reservations
from .retention import retain_generated
from .sequence_table import UNUSED, Entries, SequenceTable
from .window import AttentionWindow


@dataclass(frozen=True, slots=True)
class KvCacheUsage:
    """Blocks of the pool at one moment: `free_blocks + live_blocks + cached_blocks == max_blocks`.

    free_blocks      hold nothing
    live_blocks      are held by running sequences
    cached_blocks    are held by no sequence, and their content may be used again
    reused_blocks    prompts did not have to compute them; since construction
    evicted_blocks   cached ones whose content was lost; since construction
    host_blocks, used_host_blocks   of the pool in host memory: all, and those with content
    """

    max_blocks: int
    free_blocks: int
    live_blocks: int
    cached_blocks: int
    tokens_per_block: int
    reused_blocks: int = 0
    evicted_blocks: int = 0
    host_blocks: int = 0
    used_host_blocks: int = 0


class KvCacheManager:
    """Which request holds which blocks, and which blocks the others may still take.

    A slot belongs to the request that claimed it until that request is released. A request that owns no slot holds
    nothing. Slots may be any non-negative integers. With beams, the rows of the block tables are
    slot * max_beam_width + beam.

    window                       tokens that a query attends to; None: all of them
    temporary_attention_window   tokens by which a prompt may exceed the window; only `estimates` read it
    sink_token_length            first tokens that stay visible; with them nothing is reused
    enable_block_reuse           prompts share the cached blocks of earlier prompts
    enable_partial_reuse         also the beginning of a block
    host_blocks                  blocks of a second pool for content that is evicted from the first
    max_draft_len                drafts that a claim adds to a generating request at most; plans read the draft_len of
                                 requests only where it is not 0
    unread_steps                 this many steps of one token each may be claimed and not read: a sequence can always be
                                 rewound by so many tokens. Blocks that leave the window are released as many tokens
                                 later.
    now                          seconds; priorities may end with time

    estimates                    TensorRT-LLM's numbers, for conformance records and custom schedulers
    inflight_request_ids         requests that a launched step may be reading; set by the loop. A plan cannot count on
                                 their blocks.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, max_seq_len: int, *, max_beam_width: int = 1,
                 window: int | None = None, temporary_attention_window: int = 0, sink_token_length: int = 0,
                 enable_block_reuse: bool = False, enable_partial_reuse: bool = True, host_blocks: int = 0,
                 max_draft_len: int = 0, unread_steps: int = 0, now: Callable[[], float] = lambda: 0.0,
                 digest_bits: int = DIGEST_BITS) -> None:
        assert tokens_per_block >= 1 and max_seq_len >= 1 and max_draft_len >= 0 and unread_steps >= 0
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.window = AttentionWindow(window or max_seq_len, max_seq_len, tokens_per_block, sink_token_length,
                                      temporary_attention_window, unread_steps, max_draft_len)
        self._slides = self.window.slides
        self.inflight_request_ids: Collection[int] = frozenset()
        self.pool = BlockPool(num_blocks, now)
        self.sequences = SequenceTable(tokens_per_block, max_beam_width)
        self.cache: PrefixCache | None = None
        if enable_block_reuse and not sink_token_length:
            self.cache = PrefixCache(self.pool, tokens_per_block, enable_partial_reuse=enable_partial_reuse,
                                     host_blocks=host_blocks, digest_bits=digest_bits)
        self.estimates = Estimates(self.sequences, self.window, self.cache)
        self.reservations = Reservations(self.sequences, self.window, self.pool, self.enable_block_reuse)
        self._reordered: list[Entries] = []

    # Current numbers. Derived from the pool, never counted twice.

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self.pool.free)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.pool.num_blocks - len(self.pool.free)

    @property
    def enable_block_reuse(self) -> bool:
        return self.cache is not None

    def usage(self) -> KvCacheUsage:
        """The pool's numbers for statistics."""
        pool, cache = self.pool, self.cache
        free, cached = len(pool.free), pool.num_cached
        if cache is None:
            return KvCacheUsage(pool.num_blocks, free, pool.num_blocks - free, 0, self.tokens_per_block)
        return KvCacheUsage(pool.num_blocks, free - cached, pool.num_blocks - free, cached, self.tokens_per_block,
                            cache.reused_blocks, cache.evicted_blocks, cache.host.num_blocks,
                            cache.host.num_blocks - cache.host.num_free)

    def check_totals(self) -> None:
        """Check free + live == total. Live blocks are counted over the sequences: the entries of all tables, less the
        additional owners that the pool knows of. audit.py checks everything.

        Raises InternalError.
        """
        pool = self.pool
        free, live = len(pool.free), self.sequences.num_mentions() - pool.extra_owners
        if free + live != pool.num_blocks:
            raise InternalError(f"{free} blocks are free and {live} are held", f"{pool.num_blocks} in all")

    def owns(self, request: LlmRequest) -> bool:
        """Whether the request holds blocks."""
        return self.sequences.has(request)

    def held_blocks(self, request: LlmRequest) -> int:
        """Blocks that each beam of the request holds."""
        return self.sequences.held(request) if self.owns(request) else 0

    def kv_length(self, request: LlmRequest) -> int:
        """Tokens that the request has room for: its whole prompt with the first chunk, more with each claimed step."""
        return int(self.sequences.kv_lengths[request.seq_slot]) if self.owns(request) else 0

    def block_ids(self, request: LlmRequest, beam: int = 0) -> list[int]:
        """The blocks of one beam of the request in token order."""
        return self.sequences.blocks_of_beam(request, beam) if self.owns(request) else []

    def own_blocks(self, request: LlmRequest) -> list[int]:
        """Blocks that no other request holds or can find: all blocks that a step may have written for this request."""
        return [block_id for block_id, count in self.sequences.owners_of(request).items()
                if self.pool.owners(block_id) == count
                and (self.cache is None or self.cache.index.of_block(block_id) is None)]

    def leaving_window(self, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        """The requests that release blocks when they claim room for one more token. All of them hold blocks."""
        if not self._slides or not requests:
            return []
        slots = self.sequences.slots_of(requests)
        leaving = self.window.num_dropped(self.sequences.kv_lengths[slots] + 1) > self.sequences.dropped[slots]
        return [requests[index] for index in np.flatnonzero(leaving).tolist()]

    def blocks_of_span(self, request: LlmRequest, start: int, end: int) -> list[tuple[int, int]]:
        """(block id, index of its first token of the span) for the blocks of all beams that hold positions start..end
        of the request. Blocks that it has released are left out."""
        if not self.owns(request) or start >= end:
            return []
        unit = self.tokens_per_block
        first = start // unit
        columns = self.sequences.table(request)[:, first:block_needs.ceil_div(end, unit)]
        return [(block_id, start % unit if column == 0 else 0) for column in range(columns.shape[1])
                for block_id in dict.fromkeys(columns[:, column].tolist()) if block_id != UNUSED]

    # Numbers for plans. The table in kv/__init__.py says which of them are exact, and what uses them. The names that
    # begin with get_ are TensorRT-LLM's, for schedulers that were written for it.

    def start_scheduling(self) -> KvLedger:
        """A budget for one scheduling pass."""
        return KvLedger(self.pool, self.sequences, self.cache, self.reservations, self.inflight_request_ids)

    def get_max_resource_count(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request holds and may still take until its last token, in all, if it shares none."""
        return self.reservations.most_blocks(request)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request may still take until its last token, as TensorRT-LLM estimates them."""
        return self.estimates.get_remaining_blocks_to_completion(request)

    def blocks_to_claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest],
                        paused: Sequence[LlmRequest] = (), num_drafts: Sequence[int] | None = None) -> int:
        """Free blocks that `claim` of the same lists takes.

        paused   requests that are released first; blocks that only they hold are free by then
        """
        needed = 0
        if generation:
            slots = self.sequences.slots_of(generation)
            if num_drafts is None:
                needed = self.sequences.num_beams(self.sequences.crossing(slots))
            else:
                needed = self.sequences.sum_of_new_blocks(slots, 1 + np.asarray(num_drafts, np.int64))
        if first_chunks:
            ledger = self.start_scheduling()
            for request in paused:
                ledger.refund(request)
            for request in first_chunks:
                blocks = ledger.blocks_to_claim(request)
                ledger.spend(blocks, request)
                needed += blocks
        return needed

    def blocks_freed_by(self, paused: Sequence[LlmRequest]) -> int:
        """Blocks that no request holds any more after these have been released."""
        owners = sum(map(self.sequences.owners_of, paused), Counter())
        return sum(count == self.pool.owners(block_id) for block_id, count in owners.items())

    def reusable_tokens(self, request: LlmRequest) -> int:
        """Tokens that a claim of this first chunk is certain to find, if nothing is claimed before it."""
        if self.cache is None or self.owns(request):
            return 0
        return len(self.cache.shareable(request)) * self.tokens_per_block

    # Changes.

    def claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest],
              num_drafts: Sequence[int] | None = None) -> Claim:
        """Make room for one step: the whole prompt of each first chunk, one more token of each generating request.

        Later chunks need no claim. All or nothing. With reuse, `reused_tokens` then says how much of a prompt need not
        be computed. Expired retention priorities end before the first block is taken.

        num_drafts   [g] drafts of the generating requests, 0..max_draft_len: each gets room for so many more tokens,
                     not beyond its last one; None: no drafts

        Raises OutOfBlocksError, InternalError for a first chunk that holds blocks, a generation step that does not, or
        too many drafts; nothing is changed then.
        """
        sequences = self.sequences
        if first_chunks:
            sequences.check_slots_are_free(first_chunks)
        slots = sequences.slots_of(generation)
        lengths = sequences.kv_lengths[slots]
        if num_drafts is None:
            grown, counts, growing = lengths + 1, None, sequences.crossing(slots)
            growing_blocks = sequences.num_beams(growing) if len(growing) else 0
        else:
            grown, counts, growing = self._with_drafts(generation, slots, lengths, num_drafts)
            growing_blocks = int((counts * sequences.beam_widths[growing]).sum())

        if self.pool.has_timed_priorities:
            self.pool.end_timed_priorities()
        changed = list(self._reordered)
        if first_chunks:
            changed += self._start(first_chunks, growing_blocks)
        if growing_blocks:
            changed.append(self._grow(growing, growing_blocks, counts))
        sequences.kv_lengths[slots] = grown
        if self._slides:
            self._leave_window(slots, lengths + 1)

        updates = NO_UPDATES
        if changed:
            self._reordered = []
            updates = BlockTableUpdates(*(changed[0] if len(changed) == 1 else
                                          map(np.concatenate, zip(*changed, strict=True))))
        copies: tuple[BlockCopy, ...] = ()
        if self.cache is not None and self.cache.copies:
            copies, self.cache.copies = tuple(self.cache.copies), []
        return Claim(updates, copies, slots.astype(np.int32), lengths.astype(np.int32))

    def claim_tokens(self, generation: Sequence[LlmRequest], tokens: int) -> None:
        """Make room for so many more tokens of each generating request, as `claim` does in so many steps. For a device
        that reads no block tables: the changed entries are not returned.

        Raises OutOfBlocksError, and InternalError where blocks leave an attention window or a sequence would be longer
        than it may become; nothing is changed then.
        """
        sequences = self.sequences
        slots = sequences.slots_of(generation)
        lengths = sequences.kv_lengths[slots] + tokens
        ends = -(-lengths // self.tokens_per_block)
        if self._slides or (ends > sequences.last_blocks[slots]).any():
            raise InternalError(f"{tokens} tokens are claimed at once", "room up to the last token, and no window")
        counts = ends - sequences.ends[slots]
        growing = counts > 0
        if self.pool.has_timed_priorities:
            self.pool.end_timed_priorities()
        if growing.any():
            needed = int((counts * sequences.beam_widths[slots]).sum())
            self._grow(slots[growing], needed, counts[growing])
        sequences.kv_lengths[slots] = lengths

    def reused_tokens(self, request: LlmRequest) -> int:
        """Tokens at the front of the prompt that were cached when the request claimed its blocks."""
        return self.sequences.reused_tokens.get(request.seq_slot, 0) if self.owns(request) else 0

    def blocks_since_start(self, request: LlmRequest) -> tuple[int, int]:
        """Blocks that the request has got since its first claim: taken from the pool, and found in the cache."""
        if not self.owns(request):
            return 0, 0
        unit, beams = self.tokens_per_block, request.beam_width
        reused = -(-self.reused_tokens(request) // unit)
        grown = int(self.sequences.ends[request.seq_slot]) - -(-request.prompt_len // unit)
        first = block_needs.blocks_of_prompt(request.prompt_len, unit, beams, own_last=self.cache is not None)
        return first - reused + grown * beams, reused

    def publish_context(self, request: LlmRequest, computed_tokens: int) -> None:
        """Make the computed full blocks of the prompt reusable, except for the block of its last token.

        Call it when the step that computed them has succeeded.
        """
        if self.cache is not None and self.owns(request):
            tokens = min(request.prompt_len, computed_tokens) - 1
            self.cache.publish(request, self.sequences.table(request)[0].tolist(), tokens, with_rest=False)

    def release(self, request: LlmRequest, computed_tokens: int = 0, is_worthless: bool = False) -> None:
        """Release all that the request holds, if anything.

        computed_tokens   with one beam, so many tokens of the request, less one, become reusable for other prompts
        is_worthless      the content of its blocks is undefined: their retention priorities end here
        """
        if self.cache is not None:
            tokens = min(request.num_tokens, computed_tokens, self.kv_length(request) + 1) - 1
            if tokens > 0 and request.beam_width == 1:
                self.cache.publish(request, self.sequences.table(request)[0].tolist(), tokens, with_rest=True)
            self.cache.forget_request(request)
            if is_worthless and request.retention is not None:
                for block_id in self.own_blocks(request):
                    self.pool.set_priority(block_id, DEFAULT_PRIORITY)
        if self.owns(request):
            for beam in range(request.beam_width):
                # A later block of a prompt is of use only while the earlier ones are there, so it is released first.
                # Where nothing is cached, the blocks used last are used next: a large pool is then not touched whole.
                self.pool.give_back(self.block_ids(request, beam)[::-1], front=self.cache is None)
            self.sequences.remove(request)

    def fork(self, request: LlmRequest) -> list[BlockCopy]:
        """The copies that give all beams the last block of the prompt, which was computed for the first beam."""
        table = self.sequences.table(request)[:, :block_needs.ceil_div(request.prompt_len, self.tokens_per_block)]
        return claims.copies_of_first_beam(table, (request.prompt_len - 1) % self.tokens_per_block + 1)

    def reorder(self, request: LlmRequest, parents: Sequence[int]) -> list[BlockCopy]:
        """Make each beam continue from its parent. Takes no block; the next claim reports the tables.

        Returns the copies to be made before the next step.
        """
        assert len(parents) == request.beam_width
        if list(parents) == list(range(request.beam_width)):
            return []
        copies = claims.reorder(self.sequences.table(request), list(parents),
                                self.kv_length(request) % self.tokens_per_block, self.pool)
        self._reordered.append(self.sequences.entries(request))
        return copies

    def rewind(self, requests: Sequence[LlmRequest], num_tokens: int | Sequence[int]) -> None:
        """Take back the last tokens that these requests claimed. Their blocks are the next to be handed out.

        num_tokens   of each request, or one number for all. `unread_steps` tokens can always be taken back, and the
                     drafts of the newest step as well; more only while the needed blocks have not left the window.

        Raises InternalError when a shortened sequence could not continue: it holds no blocks, blocks that it attends to
        have left the window, or its last block is in another table too. Nothing is changed then.
        """
        claims.rewind(requests, num_tokens, self.sequences, self.pool, self.window,
                      keeps_prompts=self.cache is not None)

    def _with_drafts(self, generation: Sequence[LlmRequest], slots: np.ndarray, lengths: np.ndarray,
                     num_drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lengths with one token and these drafts more, blocks per beam that growing slots take, the growing slots).

        Raises InternalError.
        """
        drafts = np.asarray(num_drafts, np.int64)
        if drafts.shape != slots.shape:
            raise InternalError(f"{drafts.shape} drafts were given for {len(slots)} requests", "one number for each")
        grown = lengths + 1 + drafts
        ends, last = -(-grown // self.tokens_per_block), self.sequences.last_blocks[slots]
        wrong = (drafts < 0) | (drafts > self.window.max_draft_len) | ((ends > last) & (drafts > 0))
        if wrong.any():
            index = int(wrong.argmax())
            raise InternalError(
                f"{generation[index]} is to claim {drafts[index]} drafts after {lengths[index]} tokens",
                f"0 to {self.window.max_draft_len} drafts that fit into the {last[index]} blocks of all its tokens")
        counts = ends - self.sequences.ends[slots]
        growing = counts > 0
        return grown, counts[growing], slots[growing]

    def _start(self, first_chunks: Sequence[LlmRequest], taken_elsewhere: int) -> list[Entries]:
        if self.cache is None:
            return claims.start(self.pool, self.sequences, first_chunks, taken_elsewhere)
        return claims.start_with_reuse(self.cache, self.sequences, first_chunks, taken_elsewhere)

    def _grow(self, slots: np.ndarray, blocks: int, counts: np.ndarray | None) -> Entries:
        if self.cache is None:
            return self.sequences.add_blocks(slots, self.pool.take(blocks), counts)
        taken = self.cache.take(blocks)
        rows = self.sequences.beam_widths[slots] * (1 if counts is None else counts)
        owners = [self.sequences.owners[slot] for slot in np.repeat(slots, rows).tolist()]
        for request, block_id in zip(owners, taken, strict=True):
            retain_generated(self.pool, request, block_id)
        return self.sequences.add_blocks(slots, taken, counts)

    def _leave_window(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Release the blocks that these sequences, with only the first token of their step, will not attend to."""
        dropped = self.window.num_dropped(lengths)
        for index in np.flatnonzero(dropped > self.sequences.dropped[slots]).tolist():
            for row in self.sequences.drop_up_to(int(slots[index]), int(dropped[index]), self.window.sink_blocks):
                self.pool.give_back(row, front=self.cache is None)
