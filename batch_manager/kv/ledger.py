"""The budget of blocks for one scheduling pass.

The ledger counts the blocks that the loop will take from the pool for the plan. The ledger itself takes no blocks.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from operator import attrgetter

import numpy as np

from ..requests.llm_request import LlmRequest
from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .prefix_index import PrefixNode
from .reservations import Reservations
from .sequence_table import SequenceTable

_draft_len = attrgetter("draft_len")


class KvLedger:
    """The number of blocks that a plan may still spend.

    The ledger takes no blocks from the pool: the loop claims the blocks of the plan later.

    A first chunk shares the cached blocks of its prompt. A cached block that a running sequence holds costs
    nothing. A free cached block costs one block for the first chunk that shares it, and nothing for later first
    chunks of the plan. The ledger therefore tracks which blocks will have an owner when the plan is claimed. A
    block of a paused request is free unless another request holds it or the plan already shares it.

    available_blocks   free blocks of the pool, minus spent blocks, plus refunded blocks
    """

    __slots__ = ("available_blocks", "_pool", "_sequences", "_cache", "_reservations", "_inflight_request_ids",
                 "_refunded", "_shared", "_kept", "_kept_by_plan")

    def __init__(self, pool: BlockPool, sequences: SequenceTable, cache: PrefixCache | None,
                 reservations: Reservations, inflight_request_ids: Collection[int]) -> None:
        self._pool = pool
        self._sequences = sequences
        self._cache = cache
        self._reservations = reservations
        self._inflight_request_ids = inflight_request_ids
        self.available_blocks: int = len(pool.free)
        self._refunded: Counter[int] = Counter()
        self._shared: set[PrefixNode] = set()
        self._kept: set[int] | None = None
        self._kept_by_plan: set[PrefixNode] = set()

    def fits(self, blocks: int) -> bool:
        return blocks <= self.available_blocks

    def spend(self, blocks: int, starting: LlmRequest | None = None) -> None:
        """Subtract a number of blocks from the budget.

        starting   the request whose first chunk takes the blocks; None: no first chunk takes them. The cached
                   blocks that the first chunk shares count as held from now on
        """
        self.available_blocks -= blocks
        if starting is not None and self._cache is not None and not self._sequences.has(starting):
            found = self._cache.shareable(starting)
            self._shared.update(found)
            self._kept_by_plan.update(found[self._reservations.kept_columns(starting):])

    def is_refundable(self, request: LlmRequest) -> bool:
        """Whether the plan may pause this request and use its blocks for other requests.

        True if the request is in no step in flight.
        """
        return request.request_id not in self._inflight_request_ids

    def refund(self, request: LlmRequest) -> None:
        """Count the blocks of a paused request as free, except blocks that another request or the plan still uses."""
        assert self.is_refundable(request)
        owners = self._sequences.owners_of(request)
        self._refunded.update(owners)
        shared = {node.block_id for node in self._shared}
        self.available_blocks += sum(
            self._refunded[block_id] == self._pool.owners(block_id) and block_id not in shared
            for block_id in owners)

    def blocks_to_claim(self, request: LlmRequest) -> int:
        """Number of free blocks that a claim of the first chunk of `request` takes."""
        return self._reservations.to_start(request) - len(self._in_use(request))

    def blocks_for_next_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Number of free blocks that the request takes in its next step; with look-ahead, in its next two steps.

        Assumes that every draft is accepted. For a first chunk, counts only as many drafts as window and pool allow.
        """
        if not self._sequences.has(request):
            return self._reservations.to_start_with_drafts(request) - len(self._in_use(request))
        if request.is_context:
            return 0
        tokens = 1 + (request.draft_len if self._reservations.max_draft_len else 0)
        return self._sequences.new_blocks_of(request, 2 * tokens if two_step_lookahead else tokens)

    def blocks_for_next_step_of_generating(self, requests: Sequence[LlmRequest],
                                           two_step_lookahead: bool = False) -> int:
        """Number of free blocks that these generating requests together take in their next step; with look-ahead, in
        their next two steps. Assumes that every draft is accepted."""
        tokens: int | np.ndarray = 1
        if self._reservations.max_draft_len and any(map(_draft_len, requests)):
            tokens = 1 + np.fromiter(map(_draft_len, requests), np.int64, len(requests))
        return self._sequences.sum_of_new_blocks(self._sequences.slots_of(requests),
                                                 2 * tokens if two_step_lookahead else tokens)

    def blocks_to_completion(self, request: LlmRequest) -> int:
        """The largest number of free blocks that the request takes until its last token.

        Counts the blocks that leave its window as free again, except shared blocks that another sequence keeps.
        """
        if self._sequences.has(request):
            return self._reservations.of_owners([request])
        in_use = self._in_use(request)
        num_in_use = len(in_use)
        if self._kept is None:
            self._kept = self._reservations.kept_blocks()
        if self._kept is not None:
            # A sequence that slides past a shared block takes a new block without freeing the shared one.
            first_kept = self._reservations.kept_columns(request)
            num_in_use = len([index for index, node in in_use if index >= first_kept and (
                node.block_id in self._kept or node in self._kept_by_plan)])
        return self._reservations.most_blocks(request) - num_in_use

    def blocks_to_completion_of_started(self) -> int:
        """The largest number of free blocks that all started requests together take until their last tokens."""
        return self._reservations.of_all_owners()

    def _in_use(self, request: LlmRequest) -> list[tuple[int, PrefixNode]]:
        """Return the cached blocks of the prompt that cost the plan no free block.

        Each of these blocks is held by a sequence that the plan does not pause, or is shared by a first chunk that
        is already in the plan.

        Each item is (index of the block in the prompt, its node in the prefix cache).
        """
        if self._cache is None:
            return []
        return [(index, node) for index, node in enumerate(self._cache.shareable(request)) if node in self._shared or (
            node.block_id is not None and self._pool.owners(node.block_id) > self._refunded[node.block_id])]
