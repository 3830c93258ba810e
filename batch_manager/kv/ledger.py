"""A throwaway budget of blocks for one scheduling pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..requests.llm_request import LlmRequest

if TYPE_CHECKING:
    from .kv_cache_manager import KvCacheManager


class KvLedger:
    """What a plan may still spend. Nothing is taken from the pool: the loop claims for real once the plan is made.

    available_blocks   free blocks of the pool, less what was spent, plus what was refunded
    """

    __slots__ = ("available_blocks", "_kv")

    def __init__(self, kv_cache_manager: "KvCacheManager") -> None:
        self._kv = kv_cache_manager
        self.available_blocks: int = kv_cache_manager.free_blocks

    def fits(self, blocks: int) -> bool:
        return blocks <= self.available_blocks

    def spend(self, blocks: int) -> None:
        self.available_blocks -= blocks

    def is_refundable(self, request: LlmRequest) -> bool:
        """Whether a plan may count on this request's blocks. Not while a step that is in flight may read them."""
        return request.request_id not in self._kv.inflight_request_ids

    def refund(self, request: LlmRequest) -> None:
        """Count the blocks of a request that this plan pauses as free."""
        assert self.is_refundable(request)
        self.available_blocks += self._kv.held_blocks(request)

    def blocks_for_next_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        return self._kv.get_needed_blocks_one_step(request, two_step_lookahead)

    def blocks_for_next_step_of_generating(self, requests: Sequence[LlmRequest],
                                           two_step_lookahead: bool = False) -> int:
        """The sum over requests that all generate."""
        return self._kv.get_needed_blocks_one_step_of_generating(requests, two_step_lookahead)

    def blocks_to_completion(self, request: LlmRequest) -> int:
        return self._kv.get_remaining_blocks_to_completion(request)

    def blocks_to_completion_of_owners(self, requests: Sequence[LlmRequest]) -> int:
        """The sum over requests that hold blocks."""
        return self._kv.get_remaining_blocks_to_completion_of_owners(requests)
