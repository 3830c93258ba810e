"""The facade of this folder: claim, release, and the numbers schedulers plan with."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ..errors import InternalError
from ..handover import NO_UPDATES, BlockTableUpdates
from ..names import LlmRequestState
from ..requests.llm_request import LlmRequest
from . import block_needs
from .block_pool import BlockPool
from .ledger import KvLedger

_UNUSED = -1


class KvCacheManager:
    """Block tables and lengths of the running sequences, one row per slot.

    A row belongs to the request that claimed it until that request is released; what is asked about a request that
    owns no row is answered as for one that holds nothing. Slots may be any non-negative integers, rows grow on demand.

    inflight_request_ids   requests that a launched step may be reading; set by the loop. A plan cannot count on their
                           blocks.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, max_seq_len: int) -> None:
        assert tokens_per_block >= 1 and max_seq_len >= 1
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.inflight_request_ids: Collection[int] = frozenset()
        self.pool = BlockPool(num_blocks)
        self._owners: list[LlmRequest | None] = []
        self._kv_lengths = np.zeros(0, np.int64)
        self._held = np.zeros(0, np.int64)
        self._last_blocks = np.zeros(0, np.int64)          # what the sequence holds once its last token is there
        self._tables = np.full((0, 1), _UNUSED, np.int32)

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
        slot = request.seq_slot
        return 0 <= slot < len(self._owners) and self._owners[slot] is request

    def held_blocks(self, request: LlmRequest) -> int:
        """Blocks the request holds."""
        return int(self._held[request.seq_slot]) if self.owns(request) else 0

    def kv_length(self, request: LlmRequest) -> int:
        """Tokens the request has room for in the cache: its prompt from the first chunk on, one more with each step
        claimed."""
        return int(self._kv_lengths[request.seq_slot]) if self.owns(request) else 0

    def kv_lengths(self, slots: np.ndarray) -> np.ndarray:
        """`kv_length` of the requests in these slots, [n] int32."""
        return self._kv_lengths[slots].astype(np.int32)

    def block_ids(self, request: LlmRequest) -> list[int]:
        """The request's blocks in token order."""
        return self._tables[request.seq_slot, :self.held_blocks(request)].tolist() if self.owns(request) else []

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
        slots = self._slots_of_owners(requests)
        return int((self._last_blocks[slots] - self._held[slots]).sum())

    def get_needed_blocks_one_step_of_each(self, requests: Sequence[LlmRequest],
                                           two_step_lookahead: bool = False) -> list[int]:
        """`get_needed_blocks_one_step` of many requests, at once for those that generate without drafts."""
        others = {place: self.get_needed_blocks_one_step(request, two_step_lookahead)
                  for place, request in enumerate(requests)
                  if request.draft_len or request.state is LlmRequestState.CONTEXT_INIT}
        generating = requests
        if others:
            generating = [request for place, request in enumerate(requests) if place not in others]

        # A request that generates has two tokens to go or more, so a look-ahead of two steps adds two.
        lengths = self._kv_lengths[self._slots_of_owners(generating)]
        grown = lengths + (2 if two_step_lookahead else 1)
        blocks = block_needs.ceil_div(grown, self.tokens_per_block) - block_needs.ceil_div(
            lengths, self.tokens_per_block)
        needs = np.where(grown <= self.max_seq_len, blocks, 0).tolist()
        if not others:
            return needs
        at_once = iter(needs)
        return [others[place] if place in others else next(at_once) for place in range(len(requests))]

    def blocks_to_claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest]) -> int:
        """Blocks that `claim` of the same lists would take."""
        prompts = sum(block_needs.blocks_of_prompt(request.prompt_len, self.tokens_per_block)
                      for request in first_chunks)
        return prompts + len(self._crossing(self._slots_of_owners(generation)))

    # What changes.

    def claim(self, first_chunks: Sequence[LlmRequest], generation: Sequence[LlmRequest]) -> BlockTableUpdates:
        """Make room for one step: the whole prompt of each first chunk, one more token of each generating request.

        Later chunks need no claim. All or nothing.

        Raises OutOfBlocksError, InternalError for a first chunk that holds blocks or a generation step that does not;
        nothing was changed then.
        """
        slots = self._slots_of_owners(generation)
        crossing = self._crossing(slots)
        prompt_blocks = [block_needs.blocks_of_prompt(request.prompt_len, self.tokens_per_block)
                         for request in first_chunks]
        self._make_rows(first_chunks, max(prompt_blocks, default=0))
        blocks = self.pool.take(sum(prompt_blocks) + len(crossing))

        updates = []
        for request, count in zip(first_chunks, prompt_blocks, strict=True):
            updates.append(self._add_sequence(request, blocks[:count]))
            del blocks[:count]
        if len(crossing):
            updates.append(self._add_block_each(crossing, blocks))
        self._kv_lengths[slots] += 1

        if not updates:
            return NO_UPDATES
        return BlockTableUpdates(*(np.concatenate(column) for column in zip(*updates, strict=True)))

    def release(self, request: LlmRequest) -> None:
        """Give back everything the request holds; nothing happens when it holds nothing."""
        if not self.owns(request):
            return
        self.pool.give_back(self.block_ids(request))
        slot = request.seq_slot
        self._owners[slot] = None
        self._kv_lengths[slot] = self._held[slot] = self._last_blocks[slot] = 0

    # What audit.py looks at.

    def held_by_all(self) -> int:
        """Blocks that all sequences hold together."""
        return int(self._held.sum())

    def faults(self) -> Iterator[str]:
        """What is wrong with the tables, in words."""
        named: Counter[int] = Counter()
        for slot, owner in enumerate(self._owners):
            held, length = int(self._held[slot]), int(self._kv_lengths[slot])
            if owner is None:
                if held or length:
                    yield f"slot {slot} has no owner, {held} blocks and {length} tokens"
                continue
            if owner.seq_slot != slot:
                yield f"slot {slot} belongs to {owner}, which is in slot {owner.seq_slot}"
            if held != block_needs.ceil_div(length, self.tokens_per_block):
                yield f"{owner} holds {held} blocks for {length} tokens"
            if int(self._last_blocks[slot]) != self.get_needed_resource_to_completion(owner):
                yield f"{owner} was promised {int(self._last_blocks[slot])} blocks"
            named.update(self._tables[slot, :held].tolist())
        for block_id in range(self.num_blocks):
            if named[block_id] != self.pool.owners(block_id):
                yield (f"block {block_id} is in {named[block_id]} tables and has {self.pool.owners(block_id)} owners")
        if any(not 0 <= block_id < self.num_blocks for block_id in named):
            yield "a table names a block that does not exist"

    def _slots_of_owners(self, requests: Sequence[LlmRequest]) -> np.ndarray:
        slots = [request.seq_slot for request in requests]
        in_range = not slots or max(slots) < len(self._owners)
        if not in_range or [self._owners[slot] for slot in slots] != list(requests):
            stranger = next(request for request in requests if not self.owns(request))
            raise InternalError(f"{stranger} is to generate and holds no blocks")
        return np.fromiter(slots, np.intp, len(slots))

    def _crossing(self, slots: np.ndarray) -> np.ndarray:
        """Those of the slots whose next token needs a new block."""
        return slots[self._kv_lengths[slots] % self.tokens_per_block == 0]

    def _make_rows(self, requests: Sequence[LlmRequest], num_blocks: int) -> None:
        """Rows for new sequences, with columns for `num_blocks` blocks and one more."""
        taken = set()
        for request in requests:
            slot = request.seq_slot
            if slot < 0:
                raise InternalError(f"{request} has no slot")
            if slot in taken or (slot < len(self._owners) and self._owners[slot] is not None):
                raise InternalError(f"{request} starts in slot {slot}, which is taken")
            if request.beam_width != 1:
                raise InternalError(f"{request} has beam width {request.beam_width}", "the block tables hold one beam")
            taken.add(slot)
        rows = max((request.seq_slot + 1 for request in requests), default=0)
        if rows > len(self._owners):
            more = max(rows, 2 * len(self._owners)) - len(self._owners)
            self._owners += [None] * more
            self._kv_lengths = np.pad(self._kv_lengths, (0, more))
            self._held = np.pad(self._held, (0, more))
            self._last_blocks = np.pad(self._last_blocks, (0, more))
            self._tables = np.pad(self._tables, ((0, more), (0, 0)), constant_values=_UNUSED)
        self._make_columns(num_blocks)

    def _make_columns(self, num_blocks: int) -> None:
        columns = self._tables.shape[1]
        if num_blocks > columns:
            more = max(num_blocks, 2 * columns) - columns
            self._tables = np.pad(self._tables, ((0, 0), (0, more)), constant_values=_UNUSED)

    def _add_sequence(self, request: LlmRequest, block_ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slot = request.seq_slot
        self._owners[slot] = request
        self._kv_lengths[slot] = request.prompt_len
        self._held[slot] = len(block_ids)
        self._last_blocks[slot] = self.get_needed_resource_to_completion(request)
        ids = np.array(block_ids, np.int32)
        self._tables[slot, :len(ids)] = ids
        return np.full(len(ids), slot, np.int32), np.arange(len(ids), dtype=np.int32), ids

    def _add_block_each(self, slots: np.ndarray, block_ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        indices = self._held[slots]
        self._make_columns(int(indices.max()) + 1)
        ids = np.array(block_ids, np.int32)
        self._tables[slots, indices] = ids
        self._held[slots] += 1
        return slots.astype(np.int32), indices.astype(np.int32), ids
