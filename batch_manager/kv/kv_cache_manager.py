"""The facade of the KV cache accounting: it claims and releases blocks, and counts blocks for the schedulers."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InternalError, counted
from ..handover import NO_UPDATES, BlockCopy, BlockTableUpdates
from ..requests.llm_request import LlmRequest
from . import block_needs, claims
from .block_pool import BlockPool
from .claims import Claim
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
    """The state of the pool at one moment: `free_blocks + live_blocks + cached_blocks == max_blocks`.

    free_blocks      blocks that no sequence holds, without reusable content
    live_blocks      blocks that running sequences hold
    cached_blocks    blocks that no sequence holds, with reusable content
    reused_blocks    blocks that prompts found in the cache, since construction
    evicted_blocks   evicted blocks whose content was lost, not moved to a host block, since construction
    host_blocks, used_host_blocks   number of host blocks, and of host blocks with content
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

    def figures(self) -> dict[str, int]:
        """Return the statistics of the pool."""
        return {
            "Max KV cache blocks": self.max_blocks,
            # TensorRT-LLM has no cached blocks in this sense; they can be evicted at any time, so they count as free.
            "Free KV cache blocks": self.free_blocks + self.cached_blocks,
            "Used KV cache blocks": self.live_blocks,
            "Tokens per KV cache block": self.tokens_per_block,
            "Reused KV cache blocks": self.reused_blocks,
            "Cached KV cache blocks": self.cached_blocks,
            "Host KV cache blocks": self.host_blocks,
            "Used Host KV cache blocks": self.used_host_blocks,
        }


# (request, number of draft tokens) of requests that complete their context
ContextDrafts = Sequence[tuple[LlmRequest, int]]


class KvCacheManager:
    """Tracks which request holds which blocks, and which blocks are free.

    A slot belongs to the request that claimed it until that request is released. A request without a slot holds
    nothing. Slots are any non-negative integers. With beams, the rows of the block tables are
    slot * max_beam_width + beam.

    window                       tokens that a query attends to; None: all
    sink_token_length            first tokens that stay visible; if not 0, nothing is reused
    enable_block_reuse           share the cached blocks of earlier sequences
    enable_partial_reuse         also reuse the first tokens of a block
    host_blocks                  blocks of a second pool, for content that is evicted from the first
    max_draft_len                largest number of draft tokens that a claim adds to a generating request; if 0, plans
                                 ignore the draft_len of requests
    unread_steps                 number of steps of one token each whose blocks may be claimed for a request while
                                 an earlier step of the request is unread. A block that leaves the window is kept
                                 for `unread_steps` more tokens. A sequence can therefore always be rewound by
                                 `unread_steps` tokens
    now                          clock in seconds, for priorities with a duration

    inflight_request_ids         ids of the requests whose blocks a step in flight may be reading, set by the loop.
                                 Plans must not count on these blocks
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, max_seq_len: int, *, max_beam_width: int = 1,
                 window: int | None = None, sink_token_length: int = 0, enable_block_reuse: bool = False,
                 enable_partial_reuse: bool = True, host_blocks: int = 0,
                 max_draft_len: int = 0, unread_steps: int = 0, now: Callable[[], float] = lambda: 0.0,
                 digest_bits: int = DIGEST_BITS) -> None:
        assert tokens_per_block >= 1 and max_seq_len >= 1 and max_draft_len >= 0 and unread_steps >= 0
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.window = AttentionWindow(window or max_seq_len, max_seq_len, tokens_per_block, sink_token_length,
                                      unread_steps, max_draft_len)
        self._slides = self.window.slides
        self.inflight_request_ids: Collection[int] = frozenset()
        self.pool = BlockPool(num_blocks, now)
        self.sequences = SequenceTable(tokens_per_block, max_beam_width)
        self.cache: PrefixCache | None = None
        if enable_block_reuse and not sink_token_length:
            self.cache = PrefixCache(self.pool, tokens_per_block, enable_partial_reuse=enable_partial_reuse,
                                     host_blocks=host_blocks, digest_bits=digest_bits)
        self.reservations = Reservations(self.sequences, self.window, self.pool, self.enable_block_reuse)
        self._reordered: list[Entries] = []

    # Current numbers, derived from the pool.

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds, cached blocks included."""
        return len(self.pool.free)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that sequences hold."""
        return self.pool.num_blocks - len(self.pool.free)

    @property
    def enable_block_reuse(self) -> bool:
        return self.cache is not None

    def usage(self) -> KvCacheUsage:
        """Return the state of the pool, for statistics."""
        pool, cache = self.pool, self.cache
        free, cached = len(pool.free), pool.num_cached
        if cache is None:
            return KvCacheUsage(pool.num_blocks, free, pool.num_blocks - free, 0, self.tokens_per_block)
        return KvCacheUsage(pool.num_blocks, free - cached, pool.num_blocks - free, cached, self.tokens_per_block,
                            cache.reused_blocks, cache.evicted_blocks, cache.host.num_blocks,
                            cache.host.num_blocks - cache.host.num_free)

    def check_totals(self) -> None:
        """Check that free and live blocks add up to the blocks of the pool. Raises InternalError.

        The number of live blocks is the number of table entries of all sequences, minus the additional owners of shared
        blocks. audit.py has the complete check.
        """
        pool = self.pool
        free, live = len(pool.free), self.sequences.num_mentions() - pool.extra_owners
        if free + live != pool.num_blocks:
            raise InternalError(f"{free} blocks are free and {live} are held", f"expected {pool.num_blocks} in total")

    def owns(self, request: LlmRequest) -> bool:
        """Whether the request holds blocks."""
        return self.sequences.has(request)

    def held_blocks(self, request: LlmRequest) -> int:
        """Number of blocks that each beam of the request holds."""
        return self.sequences.held(request) if self.owns(request) else 0

    def kv_length(self, request: LlmRequest) -> int:
        """Number of tokens for which the request has claimed room: first its whole prompt, then more with each step."""
        return int(self.sequences.kv_lengths[request.seq_slot]) if self.owns(request) else 0

    def block_ids(self, request: LlmRequest, beam: int = 0) -> list[int]:
        """The blocks of one beam of the request, in token order."""
        return self.sequences.blocks_of_beam(request, beam) if self.owns(request) else []

    def own_blocks(self, request: LlmRequest) -> list[int]:
        """The unshared, unpublished blocks of the request. These include every block that a step may have written."""
        return [block_id for block_id, count in self.sequences.owners_of(request).items()
                if self.pool.owners(block_id) == count
                and (self.cache is None or self.cache.index.of_block(block_id) is None)]

    def leaving_window(self, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        """Return the requests whose next claim frees blocks that leave the window. All `requests` must be started."""
        if not self._slides or not requests:
            return []
        slots = self.sequences.slots_of(requests)
        leaving = self.window.num_dropped(self.sequences.kv_lengths[slots] + 1) > self.sequences.dropped[slots]
        return [requests[index] for index in np.flatnonzero(leaving).tolist()]

    def blocks_of_span(self, request: LlmRequest, start: int, end: int) -> list[tuple[int, int]]:
        """Return (block id, index) for each block of any beam that holds a position with start <= position < end.

        The index is that of the first such position, counted within the block. Released blocks are left out.
        """
        if not self.owns(request) or start >= end:
            return []
        unit = self.tokens_per_block
        first = start // unit
        columns = self.sequences.table(request)[:, first:block_needs.ceil_div(end, unit)]
        return [(block_id, start % unit if column == 0 else 0) for column in range(columns.shape[1])
                for block_id in dict.fromkeys(columns[:, column].tolist()) if block_id != UNUSED]

    # Numbers for plans. The table in kv/__init__.py lists which numbers are exact, and who uses them. Methods named
    # get_ have TensorRT-LLM's names, for schedulers written for TensorRT-LLM.

    def start_scheduling(self) -> KvLedger:
        """Return the budget of blocks for one scheduling pass."""
        return KvLedger(self.pool, self.sequences, self.cache, self.reservations, self.inflight_request_ids)

    def get_max_resource_count(self) -> int:
        """Number of blocks in the pool."""
        return self.pool.num_blocks

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """The largest number of blocks that the request holds at a time until its last token, if it shares no blocks.
        """
        return self.reservations.most_blocks(request)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Number of blocks that the request may still take until its last token, as TensorRT-LLM estimates it."""
        held = self.sequences.held(request) if self.sequences.has(request) else 0
        return block_needs.blocks_to_last_token(
            request.prompt_len, request.max_new_tokens, request.num_generated_tokens, held, self.window,
            request.beam_width, self.blocks_held_by_others(request) if request.is_first_context_chunk else 0)

    def blocks_held_by_others(self, request: LlmRequest) -> int:
        """Number of cached leading full blocks of the prompt that running sequences hold."""
        return 0 if self.cache is None else sum(map(self.cache.is_owned, self.cache.matched(request)))

    def blocks_to_claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest],
                        paused: Sequence[LlmRequest] = (), num_drafts: Sequence[int] | None = None,
                        context_drafts: ContextDrafts = ()) -> int:
        """Number of free blocks that `claim` takes for the same requests.

        paused   requests whose blocks are released before the claim
        """
        needed = int(self._after_contexts(context_drafts)[1].sum()) if context_drafts else 0
        if generation:
            slots = self.sequences.slots_of(generation)
            if num_drafts is None:
                needed += self.sequences.num_beams(self.sequences.crossing(slots))
            else:
                needed += self.sequences.sum_of_new_blocks(slots, 1 + np.asarray(num_drafts, np.int64))
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
        """Number of blocks that become free when these requests are released."""
        owners = sum(map(self.sequences.owners_of, paused), Counter())
        return sum(count == self.pool.owners(block_id) for block_id, count in owners.items())

    def reusable_tokens(self, request: LlmRequest) -> int:
        """Least number of cached tokens that the claim of a new request finds, if no other request claims first."""
        if self.cache is None or self.owns(request):
            return 0
        return len(self.cache.shareable(request)) * self.tokens_per_block

    # Changes.

    def claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest],
              num_drafts: Sequence[int] | None = None, context_drafts: ContextDrafts = ()) -> Claim:
        """Claim the blocks for a step: for the whole prompt of each first chunk, and for one more token of each
        generating request. Later chunks need no claim.

        After a claim with reuse, `reused_tokens` returns the number of cached tokens of each prompt. Before the first
        block is taken, expired retention priorities are reset to the default.

        num_drafts       [g] number of draft tokens of each generating request, 0..max_draft_len; room for them is
                         claimed in addition. None: no drafts
        context_drafts   the requests that complete their context and verify drafts, with the number of drafts

        Raises OutOfBlocksError if too few blocks are free; nothing is claimed then, but expired priorities may have
        been reset. Raises InternalError, with nothing changed, for a first chunk without a free slot, a generating
        request without blocks, or too many drafts.
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
        if context_drafts:
            context_slots, context_counts = self._after_contexts(context_drafts)
            counts = np.concatenate([np.ones(len(growing), np.int64) if counts is None else counts,
                                     context_counts[context_counts > 0]])
            growing = np.concatenate([growing, context_slots[context_counts > 0]])
            growing_blocks += int(context_counts.sum())

        if self.pool.has_timed_priorities:
            self.pool.end_timed_priorities()
        changed = list(self._reordered)
        if first_chunks:
            changed += self._start(first_chunks, growing_blocks)
        if growing_blocks:
            changed.append(self._grow(growing, growing_blocks, counts))
        sequences.kv_lengths[slots] = grown
        if context_drafts:
            sequences.kv_lengths[context_slots] += [count for _, count in context_drafts]
        if self._slides:
            self._leave_window(slots, lengths + 1)

        updates = NO_UPDATES
        if changed:
            self._reordered = []
            updates = BlockTableUpdates(*(changed[0] if len(changed) == 1 else
                                          map(np.concatenate, zip(*changed, strict=True))))
        copies: tuple[BlockCopy, ...] = ()
        if self.cache is not None and self.cache.copies:
            copies = tuple(self.cache.take_copies())
        return Claim(updates, copies, slots.astype(np.int32), lengths.astype(np.int32))

    def claim_tokens(self, generation: Sequence[LlmRequest], tokens: int) -> None:
        """Claim room for `tokens` more tokens of each generating request, as `tokens` calls of `claim` would.

        The method serves devices without block tables: it does not return the changed entries.

        Raises OutOfBlocksError if too few blocks are free; nothing is claimed then, but expired priorities may have
        been reset. Raises InternalError, with nothing changed, if the attention window is shorter than max_seq_len, or
        if a request would get more blocks than its final length needs.
        """
        sequences = self.sequences
        slots = sequences.slots_of(generation)
        lengths = sequences.kv_lengths[slots] + tokens
        ends = -(-lengths // self.tokens_per_block)
        if self._slides:
            raise InternalError(f"a step claims {counted(tokens, 'token')} at once, with an attention window of "
                                f"{counted(self.window.size, 'token')}", "expected a window of max_seq_len")
        if (ends > sequences.last_blocks[slots]).any():
            raise InternalError(f"a step claims {counted(tokens, 'token')} at once, beyond the end of a request",
                                "expected no more blocks than the request's final length needs")
        counts = ends - sequences.ends[slots]
        growing = counts > 0
        if self.pool.has_timed_priorities:
            self.pool.end_timed_priorities()
        if growing.any():
            needed = int((counts * sequences.beam_widths[slots]).sum())
            self._grow(slots[growing], needed, counts[growing])
        sequences.kv_lengths[slots] = lengths

    def reused_tokens(self, request: LlmRequest) -> int:
        """Number of leading prompt tokens that were cached when the request started."""
        return self.sequences.reused_tokens.get(request.seq_slot, 0) if self.owns(request) else 0

    def blocks_since_start(self, request: LlmRequest) -> tuple[int, int]:
        """Return how many blocks the request has taken from the pool since it started, and how many it found in the
        cache. A paused request that starts again counts from zero."""
        if not self.owns(request):
            return 0, 0
        unit, beams = self.tokens_per_block, request.beam_width
        reused = -(-self.reused_tokens(request) // unit)
        grown = int(self.sequences.ends[request.seq_slot]) - -(-request.prompt_len // unit)
        first = block_needs.blocks_of_prompt(request.prompt_len, unit, beams, own_last=self.cache is not None)
        return first - reused + grown * beams, reused

    def publish_context(self, request: LlmRequest, computed_tokens: int) -> None:
        """Publish the computed full blocks of the prompt, except for the block of its last token.

        Call the method after the step that computed these blocks was read.
        """
        if self.cache is not None and self.owns(request):
            tokens = min(request.prompt_len, computed_tokens) - 1
            self.cache.publish(request, self.sequences.table(request)[0].tolist(), tokens, with_rest=False)

    def release(self, request: LlmRequest, computed_tokens: int = 0, is_garbage: bool = False) -> None:
        """Release the blocks of the request, if it holds any.

        computed_tokens   number of leading tokens that were computed or sampled. All but the last of them are
                          published; with several beams, none
        is_garbage        whether the content of the request's own blocks is undefined; if so, their retention
                          priorities are reset
        """
        if self.cache is not None:
            tokens = min(request.num_tokens, computed_tokens, self.kv_length(request) + 1) - 1
            if tokens > 0 and request.beam_width == 1:
                self.cache.publish(request, self.sequences.table(request)[0].tolist(), tokens, with_rest=True)
            elif tokens > 0:
                self.cache.offer(request, min(tokens, request.prompt_len - 1))
            self.cache.forget_request(request)
            if is_garbage and request.retention is not None:
                for block_id in self.own_blocks(request):
                    self.pool.set_priority(block_id, DEFAULT_PRIORITY)
        if self.owns(request):
            for beam in range(request.beam_width):
                # Later blocks of a prompt are useless without the earlier ones. They are released first, and evicted
                # first. Without a cache, the most recently used blocks are allocated next, which leaves most of a large
                # pool untouched.
                self.pool.give_back(self.block_ids(request, beam)[::-1], front=self.cache is None)
            self.sequences.remove(request)

    def fork(self, request: LlmRequest) -> list[BlockCopy]:
        """Return the copies that give each beam's last prompt block the content of the first beam's last prompt block.
        """
        table = self.sequences.table(request)[:, :block_needs.ceil_div(request.prompt_len, self.tokens_per_block)]
        return claims.copies_of_first_beam(table, (request.prompt_len - 1) % self.tokens_per_block + 1)

    def reorder(self, request: LlmRequest, parents: Sequence[int]) -> list[BlockCopy]:
        """Make beam b of the request continue from beam parents[b]. The next claim returns the changed table entries.

        Takes no block. Returns the copies to make before the next step.
        """
        assert len(parents) == request.beam_width
        if list(parents) == list(range(request.beam_width)):
            return []
        copies = claims.reorder(self.sequences.table(request), list(parents),
                                self.kv_length(request) % self.tokens_per_block, self.pool)
        self._reordered.append(self.sequences.entries(request))
        return copies

    def rewind(self, requests: Sequence[LlmRequest], num_tokens: int | Sequence[int]) -> None:
        """Undo the claims of the last tokens of these requests. The released blocks are the next to be allocated.

        num_tokens   tokens to remove: a number for each request, or one number for all. `unread_steps` tokens and the
                     drafts of the newest step can always be removed. More tokens can be removed only while the blocks
                     that the shorter sequence needs are in the window

        Raises InternalError, with nothing changed, if a number of tokens is negative, or if a request holds no
        blocks or occurs twice. Also raises it if a shortened sequence would be empty, or would need blocks that
        were released because they left the window. With block reuse, also raises it if a sequence would become
        shorter than its prompt. With beams, also raises it if the new last block of a sequence would be partly
        filled and shared.
        """
        claims.rewind(requests, num_tokens, self.sequences, self.pool, self.window,
                      keeps_prompts=self.cache is not None)

    def _with_drafts(self, generation: Sequence[LlmRequest], slots: np.ndarray, lengths: np.ndarray,
                     num_drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (lengths, counts, growing), for a claim of one more token and `num_drafts` drafts of each request.

        lengths   [n] lengths after the claim
        growing   slots that need new blocks
        counts    number of new blocks per beam, for each slot of `growing`

        Raises InternalError for too many drafts.
        """
        drafts = np.asarray(num_drafts, np.int64)
        if drafts.shape != slots.shape:
            raise InternalError(f"num_drafts has shape {drafts.shape} for {counted(len(slots), 'request')}",
                                "expected one number for each")
        grown = lengths + 1 + drafts
        ends, last = -(-grown // self.tokens_per_block), self.sequences.last_blocks[slots]
        wrong = (drafts < 0) | (drafts > self.window.max_draft_len) | ((ends > last) & (drafts > 0))
        if wrong.any():
            index = int(wrong.argmax())
            raise InternalError(
                f"{generation[index]} claims {counted(drafts[index], 'draft')} after "
                f"{counted(lengths[index], 'token')}",
                f"expected 0 to {counted(self.window.max_draft_len, 'draft')}, all in the "
                f"{counted(last[index], 'block')} that the request has at its final length")
        counts = ends - self.sequences.ends[slots]
        growing = counts > 0
        return grown, counts[growing], slots[growing]

    def most_context_drafts(self, request: LlmRequest) -> int:
        """The largest number of draft tokens that the request may verify with the last chunk of its context.

        A plan counts blocks for them with the first chunk. With a later one, the drafts must fit into the last block of
        the prompt.
        """
        unit, most = self.tokens_per_block, min(request.draft_len, self.window.max_draft_len,
                                                request.max_new_tokens - 1)
        if self.owns(request):
            return min(most, -request.prompt_len % unit)
        return max(min(most, self.window.size + request.max_new_tokens - request.prompt_len,
                       self.num_blocks * unit - request.prompt_len), 0)

    def _after_contexts(self, context_drafts: ContextDrafts) -> tuple[np.ndarray, np.ndarray]:
        """Return ([n] slots of these requests, [n] blocks that each takes for its drafts, after those of its prompt).

        Raises InternalError for too many drafts.
        """
        slots, prompts, drafts = np.array([(request.seq_slot, request.prompt_len, count)
                                           for request, count in context_drafts], np.int64).T
        for request, count in context_drafts:
            if not 0 <= count <= self.most_context_drafts(request):
                raise InternalError(f"{request} claims {counted(count, 'draft')} after its context",
                                    f"expected 0 to {self.most_context_drafts(request)}")
        unit = self.tokens_per_block
        return slots, -(-(prompts + drafts) // unit) - -(-prompts // unit)

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
        """Release the blocks that have left the window of their sequence, for the sequences in `slots`.

        lengths   [n] lengths that include the first token of the step
        """
        dropped = self.window.num_dropped(lengths)
        for index in np.flatnonzero(dropped > self.sequences.dropped[slots]).tolist():
            for row in self.sequences.drop_up_to(int(slots[index]), int(dropped[index]), self.window.sink_blocks):
                self.pool.give_back(row, front=self.cache is None)
