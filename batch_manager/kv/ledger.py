"""A throwaway budget of blocks for one scheduling pass."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..requests.llm_request import LlmRequest

if TYPE_CHECKING:
    from .kv_cache_manager import KvCacheManager


class KvLedger:
    """What a plan may still spend. Nothing is taken from the pool: the loop claims for real once the plan is made.

    available_blocks   free blocks of the pool, less what was spent, plus what was refunded
    """

    __slots__ = ("available_blocks", "_kv", "_counted_on", "_refunded")

    def __init__(self, kv_cache_manager: "KvCacheManager") -> None:
        self._kv = kv_cache_manager
        self.available_blocks: int = kv_cache_manager.free_blocks
        self._counted_on: set[int] = set()
        self._refunded: Counter[int] = Counter()

    def fits(self, blocks: int) -> bool:
        return blocks <= self.available_blocks

    def spend(self, blocks: int) -> None:
        self.available_blocks -= blocks

    def is_refundable(self, request: LlmRequest) -> bool:
        """Whether a plan may count on this request's blocks. Not while a step that is in flight may read them."""
        return request.request_id not in self._kv.inflight_request_ids

    def refund(self, request: LlmRequest) -> None:
        """Count the blocks of a request that this plan pauses as free.

        Not those that others hold too, nor those that a context this plan looked at would share with it.
        """
        assert self.is_refundable(request)
        owners = self._kv.owners_of(request)
        self._refunded.update(owners)
        self.available_blocks += sum(
            self._refunded[block_id] == self._kv.pool.owners(block_id) and block_id not in self._counted_on
            for block_id in owners)

    def blocks_for_next_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        return self._kv.get_needed_blocks_one_step(request, two_step_lookahead) + self._sharing(request)

    def blocks_for_next_step_of_generating(self, requests: Sequence[LlmRequest],
                                           two_step_lookahead: bool = False) -> int:
        """The sum over requests that all generate."""
        return self._kv.get_needed_blocks_one_step_of_generating(requests, two_step_lookahead)

    def blocks_to_completion(self, request: LlmRequest) -> int:
        return self._kv.get_remaining_blocks_to_completion(request) + self._sharing(request)

    def blocks_to_completion_of_owners(self, requests: Sequence[LlmRequest]) -> int:
        """The sum over requests that hold blocks."""
        return self._kv.get_remaining_blocks_to_completion_of_owners(requests)

    def _sharing(self, request: LlmRequest) -> int:
        """Note what a first chunk counts on; what it takes beyond the estimate."""
        if not self._kv.enable_block_reuse:
            return 0
        self._counted_on.update(self._kv.blocks_to_share(request))
        return self._kv.blocks_not_estimated(request)
