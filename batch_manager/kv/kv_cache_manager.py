"""The facade of this folder: claim, release, and the numbers schedulers plan with."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ..handover import NO_UPDATES, BlockCopy, BlockTableUpdates
from ..requests.llm_request import LlmRequest
from . import beams, block_needs, rewinding, starting
from .block_pool import BlockPool
from .claims import Claim
from .estimates import Estimates
from .ledger import KvLedger
from .prefix_cache import PrefixCache
from .prefix_index import DIGEST_BITS
from .reservations import Reservations
from .retention import retain_generated
from .sequence_table import Entries, SequenceTable
from .window import AttentionWindow


class KvCacheManager:
    """Which request holds which blocks, and what the others may still take.

    A slot belongs to the request that claimed it until that request is released; what is asked about a request that
    owns no slot is answered as for one that holds nothing. Slots may be any non-negative integers. With beams, the
    rows of the block tables are slot * max_beam_width + beam.

    window                       tokens a query looks back on; None: all of them
    temporary_attention_window   tokens by which a prompt may exceed the window in the estimates; plans do not need it
    sink_token_length            first tokens that stay visible; with them nothing is reused
    enable_block_reuse           prompts share what is in the cache of the prompts before them
    enable_partial_reuse         also the beginning of a block
    host_blocks                  blocks of a second pool for what is evicted from the first
    now                          seconds; priorities may end with time
    inflight_request_ids         requests that a launched step may be reading; set by the loop. A plan cannot count on
                                 their blocks.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, max_seq_len: int, *, max_beam_width: int = 1,
                 window: int | None = None, temporary_attention_window: int = 0, sink_token_length: int = 0,
                 enable_block_reuse: bool = False, enable_partial_reuse: bool = True, host_blocks: int = 0,
                 now: Callable[[], float] = lambda: 0.0, digest_bits: int = DIGEST_BITS) -> None:
        assert tokens_per_block >= 1 and max_seq_len >= 1
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.window = AttentionWindow(window or max_seq_len, max_seq_len, tokens_per_block, sink_token_length,
                                      temporary_attention_window)
        self.inflight_request_ids: Collection[int] = frozenset()
        self.pool = BlockPool(num_blocks, now)
        self.sequences = SequenceTable(max_beam_width)
        self.cache: PrefixCache | None = None
        if enable_block_reuse and not sink_token_length:
            self.cache = PrefixCache(self.pool, tokens_per_block, enable_partial_reuse=enable_partial_reuse,
                                     host_blocks=host_blocks, digest_bits=digest_bits)
        self.estimates = Estimates(self.sequences, self.window, self.cache)
        self.reservations = Reservations(self.sequences, self.window, self.pool, self.enable_block_reuse)
        self._reordered: list[Entries] = []

    # What is there. Derived from the pool, never counted twice.

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds, those included that are cached."""
        return self.pool.num_free

    @property
    def used_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    @property
    def cached_blocks(self) -> int:
        """Free blocks whose content may be used again."""
        return self.pool.num_cached

    @property
    def host_blocks(self) -> int:
        """Blocks of the host's pool."""
        return 0 if self.cache is None else self.cache.host.num_blocks

    @property
    def used_host_blocks(self) -> int:
        """Those of them that hold something."""
        return 0 if self.cache is None else self.cache.host.num_blocks - self.cache.host.num_free

    @property
    def reused_blocks(self) -> int:
        """Blocks so far that prompts did not have to compute."""
        return 0 if self.cache is None else self.cache.reused_blocks

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks so far whose content was lost."""
        return 0 if self.cache is None else self.cache.evicted_blocks

    def owns(self, request: LlmRequest) -> bool:
        """Whether the request holds blocks."""
        return self.sequences.has(request)

    def held_blocks(self, request: LlmRequest) -> int:
        """Blocks each beam of the request holds."""
        return self.sequences.held(request) if self.owns(request) else 0

    def kv_length(self, request: LlmRequest) -> int:
        """Tokens the request has room for: its whole prompt with the first chunk, one more with each step claimed."""
        return int(self.sequences.kv_lengths[request.seq_slot]) if self.owns(request) else 0

    def block_ids(self, request: LlmRequest, beam: int = 0) -> list[int]:
        """The blocks of one beam of the request in token order."""
        return self.sequences.blocks_of_beam(request, beam) if self.owns(request) else []

    def owners_of(self, request: LlmRequest) -> Counter[int]:
        """The blocks of the request, and how many of its beams hold each."""
        return Counter(block_id for beam in range(request.beam_width) for block_id in self.block_ids(request, beam))

    def own_blocks(self, request: LlmRequest) -> list[int]:
        """Blocks that nobody else holds, nor can find: all that a step may have written to for this request."""
        return [block_id for block_id, count in self.owners_of(request).items()
                if self.pool.owners(block_id) == count
                and (self.cache is None or self.cache.index.of_block(block_id) is None)]

    def blocks_freed_by(self, paused: Sequence[LlmRequest]) -> int:
        """Blocks that nobody holds once these requests were released."""
        owners = sum(map(self.owners_of, paused), Counter())
        return sum(count == self.pool.owners(block_id) for block_id, count in owners.items())

    # What a plan needs to know. The names are those of TensorRT-LLM.

    def start_scheduling(self) -> KvLedger:
        """A budget for one scheduling pass."""
        return KvLedger(self)

    def get_max_resource_count(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks the request has and may take until its last token, all together, if it shares none."""
        return self.reservations.in_all(request)

    def most_blocks(self, request: LlmRequest, *, with_pauses: bool = False) -> int:
        """Blocks with which the request can run when it is alone.

        with_pauses   it may be paused: then a window saves nothing, as all that it has is stored when it resumes
        """
        return (self.reservations.in_all_with_pauses if with_pauses else self.reservations.in_all)(request)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks the request may still take until its last token, estimated."""
        return self.estimates.to_completion(request)

    def get_needed_blocks_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Blocks the request takes in its next step, estimated; with look-ahead, in its next two."""
        return self.estimates.one_step(request, two_step_lookahead)

    def get_remaining_blocks_to_completion_of_owners(self, requests: Sequence[LlmRequest]) -> int:
        """Blocks that these requests, which all hold some, may still take until their last tokens."""
        return self.reservations.of_owners(requests)

    def get_needed_blocks_one_step_of_generating(self, requests: Sequence[LlmRequest],
                                                 two_step_lookahead: bool = False) -> int:
        """`get_needed_blocks_one_step` summed over requests that all generate, at once for those without drafts."""
        return self.estimates.one_step_of_generating(requests, two_step_lookahead)

    def blocks_to_claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest],
                        paused: Sequence[LlmRequest] = ()) -> int:
        """Free blocks that `claim` of the same lists takes.

        paused   requests that are released before; what only they hold is free by then
        """
        needed = self.sequences.num_beams(self._crossing(self.sequences.slots_of(generation)))
        ledger = self.start_scheduling()
        for request in paused:
            ledger.refund(request)
        for request in first_chunks:
            blocks = ledger.blocks_to_claim(request)
            ledger.spend(blocks, request)
            needed += blocks
        return needed

    # What a plan needs to know of the prefixes that are cached.

    @property
    def enable_block_reuse(self) -> bool:
        return self.cache is not None

    def reusable_blocks(self, request: LlmRequest) -> tuple[int, int]:
        """Full blocks of the prompt that are cached, from the first on: those that others hold, and all."""
        return self.estimates.held_by_others(request), 0 if self.cache is None else len(self.cache.matched(request))

    def estimated_reusable_tokens(self, request: LlmRequest, to_completion: bool) -> int:
        """Tokens of a first chunk that need not be computed, as the two estimates of needed blocks count them."""
        return self.estimates.reusable_tokens(request, to_completion)

    def reusable_tokens(self, request: LlmRequest) -> int:
        """Tokens that a claim of this first chunk finds for certain, as long as nothing is claimed before it."""
        if self.cache is None or self.owns(request):
            return 0
        return len(self.cache.shareable(request)) * self.tokens_per_block

    def first_new_key(self, request: LlmRequest) -> bytes | None:
        """Names the prompt up to its first full block that is not cached; None when all are or nothing is reused."""
        return None if self.cache is None else self.cache.first_new_key(request)

    # What changes.

    def claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest]) -> Claim:
        """Make room for one step: the whole prompt of each first chunk, one more token of each generating request.

        Later chunks need no claim. All or nothing. With reuse, `reused_tokens` says from then on how much of a prompt
        need not be computed.

        Raises OutOfBlocksError, InternalError for a first chunk that holds blocks or a generation step that does not;
        nothing was changed then.
        """
        self.sequences.check_slots_are_free(first_chunks)
        slots = self.sequences.slots_of(generation)
        lengths = self.sequences.kv_lengths[slots]
        crossing = self._crossing(slots)
        crossing_blocks = self.sequences.num_beams(crossing)
        changed = list(self._reordered)
        if first_chunks:
            changed += self._start(first_chunks, crossing_blocks)
        if crossing_blocks:
            changed.append(self._grow(crossing, crossing_blocks))
        self.sequences.kv_lengths[slots] = lengths + 1
        if self.window.slides:
            self._leave_window(slots)

        updates = NO_UPDATES
        if changed:
            self._reordered = []
            updates = BlockTableUpdates(*(np.concatenate(column) for column in zip(*changed, strict=True)))
        copies = ()
        if self.cache is not None and self.cache.copies:
            copies, self.cache.copies = tuple(self.cache.copies), []
        return Claim(updates, copies, slots.astype(np.int32), lengths.astype(np.int32))

    def reused_tokens(self, request: LlmRequest) -> int:
        """Tokens at the front of the prompt that were in the cache when the request claimed its blocks."""
        return self.sequences.reused_tokens.get(request.seq_slot, 0) if self.owns(request) else 0

    def publish_context(self, request: LlmRequest, computed_tokens: int) -> None:
        """Let other prompts use the full blocks of the prompt that are computed; not the block of its last token.

        To be called when the step that computed them has succeeded.
        """
        if self.cache is not None and self.owns(request):
            tokens = min(request.prompt_len, computed_tokens) - 1
            self.cache.publish(request, self.sequences.table(request)[0].tolist(), tokens, with_rest=False)

    def release(self, request: LlmRequest, computed_tokens: int = 0) -> None:
        """Give back everything the request holds; nothing happens when it holds nothing.

        computed_tokens   with one beam, so many tokens of the request but for the last are left for other prompts
        """
        if self.cache is not None:
            tokens = min(request.num_tokens, computed_tokens, self.kv_length(request) + 1) - 1
            if tokens > 0 and request.beam_width == 1:
                self.cache.publish(request, self.sequences.table(request)[0].tolist(), tokens, with_rest=True)
            self.cache.forget_request(request)
        if self.owns(request):
            for beam in range(request.beam_width):
                # What follows in a prompt is of use only as long as what comes before is there: it goes first. Where
                # nothing is cached the blocks used last are used next, so that a large pool is not touched whole.
                self.pool.give_back(self.block_ids(request, beam)[::-1], front=self.cache is None)
            self.sequences.remove(request)

    def fork(self, request: LlmRequest) -> list[BlockCopy]:
        """What gives all beams the last block of the prompt once it was computed for the first beam."""
        table = self.sequences.table(request)[:, :block_needs.ceil_div(request.prompt_len, self.tokens_per_block)]
        return beams.copies_of_first_beam(table, (request.prompt_len - 1) % self.tokens_per_block + 1)

    def reorder(self, request: LlmRequest, parents: Sequence[int]) -> list[BlockCopy]:
        """Make each beam go on where its parent stands. Takes no block; the next claim reports the tables.

        Returns what has to be copied before the next step.
        """
        assert len(parents) == request.beam_width
        if list(parents) == list(range(request.beam_width)):
            return []
        copies = beams.reorder(self.sequences.table(request), list(parents),
                               self.kv_length(request) % self.tokens_per_block, self.pool)
        self._reordered.append(self.sequences.entries(request))
        return copies

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """Take back the last tokens a request claimed. Their blocks are the next to be handed out.

        Raises InternalError when what is left cannot be gone on with: blocks behind the new end left the window, or
        the last one is in somebody else's table too. Nothing was changed then.
        """
        shortest = 1 if self.cache is None else request.prompt_len
        rewinding.rewind(request, num_tokens, shortest, self.sequences, self.pool, self.window)

    def refresh(self) -> None:
        """Let retention priorities end whose time is over. Once per iteration is enough."""
        self.pool.refresh()

    def _start(self, first_chunks: Sequence[LlmRequest], taken_elsewhere: int) -> list[Entries]:
        if self.cache is None:
            return starting.start(self.pool, self.sequences, first_chunks, taken_elsewhere, self.tokens_per_block)
        return starting.start_with_reuse(self.cache, self.sequences, first_chunks, taken_elsewhere)

    def _grow(self, crossing: np.ndarray, blocks: int) -> Entries:
        if self.cache is None:
            return self.sequences.add_block_each(crossing, self.pool.take(blocks))
        taken = self.cache.take(blocks)
        owners = [self.sequences.owners[slot] for slot in crossing.tolist()]
        for request, block_id in zip((owner for owner in owners for _ in range(owner.beam_width)), taken, strict=True):
            retain_generated(self.pool, request, block_id)
        return self.sequences.add_block_each(crossing, taken)

    def _leave_window(self, slots: np.ndarray) -> None:
        """Give back the blocks that these sequences will not look at any more."""
        dropped = self.window.num_dropped(self.sequences.kv_lengths[slots])
        for place in np.flatnonzero(dropped > self.sequences.dropped[slots]).tolist():
            for row in self.sequences.drop_up_to(int(slots[place]), int(dropped[place]), self.window.sink_blocks):
                self.pool.give_back(row, front=self.cache is None)

    def _crossing(self, slots: np.ndarray) -> np.ndarray:
        """Those of the slots whose next token needs a new block."""
        return slots[self.sequences.kv_lengths[slots] % self.tokens_per_block == 0]
