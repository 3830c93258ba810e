"""The facade of this folder: claim, release, and the numbers schedulers plan with."""

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from ..handover import NO_UPDATES, BlockTableUpdates
from ..requests.llm_request import LlmRequest
from . import block_needs
from .block_pool import BlockPool
from .ledger import KvLedger
from .sequence_table import SequenceTable


class KvCacheManager:
    """Which request holds which blocks, and what the others may still take.

    A slot belongs to the request that claimed it until that request is released; what is asked about a request that
    owns no slot is answered as for one that holds nothing. Slots may be any non-negative integers.

    inflight_request_ids   requests that a launched step may be reading; set by the loop. A plan cannot count on their
                           blocks.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, max_seq_len: int) -> None:
        assert tokens_per_block >= 1 and max_seq_len >= 1
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.inflight_request_ids: Collection[int] = frozenset()
        self.pool = BlockPool(num_blocks)
        self.sequences = SequenceTable()

    # What is there. Derived from the pool, never counted twice.

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def used_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    def owns(self, request: LlmRequest) -> bool:
        """Whether the request holds blocks."""
        return self.sequences.has(request)

    def held_blocks(self, request: LlmRequest) -> int:
        """Blocks the request holds."""
        return int(self.sequences.held[request.seq_slot]) if self.owns(request) else 0

    def kv_length(self, request: LlmRequest) -> int:
        """Tokens the request has room for: its whole prompt with the first chunk, one more with each step claimed."""
        return int(self.sequences.kv_lengths[request.seq_slot]) if self.owns(request) else 0

    def kv_lengths(self, slots: np.ndarray) -> np.ndarray:
        """`kv_length` of the requests in these slots, [n] int32."""
        return self.sequences.kv_lengths[slots].astype(np.int32)

    def block_ids(self, request: LlmRequest) -> list[int]:
        """The request's blocks in token order."""
        if not self.owns(request):
            return []
        return self.sequences.block_ids[request.seq_slot, :self.held_blocks(request)].tolist()

    # What a plan needs to know. The names are those of TensorRT-LLM.

    def start_scheduling(self) -> KvLedger:
        """A budget for one scheduling pass."""
        return KvLedger(self)

    def get_max_resource_count(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks the request has and may take until its last token, all together."""
        return block_needs.blocks_to_last_token(request.prompt_len, request.max_new_tokens, 0, self.tokens_per_block,
                                                request.beam_width)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks the request may still take until its last token."""
        return block_needs.blocks_to_last_token(request.prompt_len, request.max_new_tokens, self.held_blocks(request),
                                                self.tokens_per_block, request.beam_width)

    def get_needed_blocks_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Blocks the request takes in its next step; with look-ahead, in its next two."""
        if not self.owns(request):
            return block_needs.blocks_for_first_chunk(
                request.prompt_len, request.draft_len, request.max_new_tokens, self.max_seq_len,
                self.tokens_per_block, request.beam_width)
        if request.is_context:
            return 0
        kv_length = self.kv_length(request)
        return block_needs.blocks_for_generation_step(
            kv_length, request.prompt_len + request.max_new_tokens - kv_length, request.draft_len, self.max_seq_len,
            self.tokens_per_block, request.beam_width, two_step_lookahead)

    def get_remaining_blocks_to_completion_of_owners(self, requests: Sequence[LlmRequest]) -> int:
        """`get_remaining_blocks_to_completion` summed over requests that all hold blocks, at once."""
        slots = self.sequences.slots_of(requests)
        return int((self.sequences.last_blocks[slots] - self.sequences.held[slots]).sum())

    def get_needed_blocks_one_step_of_generating(self, requests: Sequence[LlmRequest],
                                                 two_step_lookahead: bool = False) -> int:
        """`get_needed_blocks_one_step` summed over requests that all generate, at once for those without drafts."""
        drafting = [request for request in requests if request.draft_len]
        if drafting:
            requests = [request for request in requests if not request.draft_len]

        # A request that generates has two tokens to go or more, so a look-ahead of two steps adds two.
        lengths = self.sequences.kv_lengths[self.sequences.slots_of(requests)]
        grown = lengths + (2 if two_step_lookahead else 1)
        blocks = block_needs.ceil_div(grown, self.tokens_per_block) - block_needs.ceil_div(
            lengths, self.tokens_per_block)
        needed = int(blocks[grown <= self.max_seq_len].sum())
        return needed + sum(self.get_needed_blocks_one_step(request, two_step_lookahead) for request in drafting)

    def blocks_to_claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest]) -> int:
        """Blocks that `claim` of the same lists would take."""
        prompts = sum(block_needs.blocks_of_prompt(request.prompt_len, self.tokens_per_block)
                      for request in first_chunks)
        return prompts + len(self._crossing(self.sequences.slots_of(generation)))

    # What changes.

    def claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest]) -> BlockTableUpdates:
        """Make room for one step: the whole prompt of each first chunk, one more token of each generating request.

        Later chunks need no claim. All or nothing.

        Raises OutOfBlocksError, InternalError for a first chunk that holds blocks or a generation step that does not;
        nothing was changed then.
        """
        self.sequences.check_slots_are_free(first_chunks)
        slots = self.sequences.slots_of(generation)
        crossing = self._crossing(slots)
        prompt_blocks = [block_needs.blocks_of_prompt(request.prompt_len, self.tokens_per_block)
                         for request in first_chunks]
        taken = iter(self.pool.take(sum(prompt_blocks) + len(crossing)))

        changed = []
        for request, count in zip(first_chunks, prompt_blocks, strict=True):
            last_blocks = self.get_needed_resource_to_completion(request)
            changed.append(self.sequences.add(request, list(islice(taken, count)), last_blocks))
        if len(crossing):
            changed.append(self.sequences.add_block_each(crossing, list(taken)))
        self.sequences.kv_lengths[slots] += 1

        if not changed:
            return NO_UPDATES
        return BlockTableUpdates(*(np.concatenate(column) for column in zip(*changed, strict=True)))

    def release(self, request: LlmRequest) -> None:
        """Give back everything the request holds; nothing happens when it holds nothing."""
        if self.owns(request):
            self.pool.give_back(self.block_ids(request))
            self.sequences.remove(request)

    def _crossing(self, slots: np.ndarray) -> np.ndarray:
        """Those of the slots whose next token needs a new block."""
        return slots[self.sequences.kv_lengths[slots] % self.tokens_per_block == 0]
