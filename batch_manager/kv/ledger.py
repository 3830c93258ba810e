"""A throwaway budget of blocks for one scheduling pass: it knows what a claim of the plan will take."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..requests.llm_request import LlmRequest
from .prefix_index import PrefixNode

if TYPE_CHECKING:
    from .kv_cache_manager import KvCacheManager


class KvLedger:
    """What a plan may still spend. Nothing is taken from the pool: the loop claims for real once the plan is made.

    A first chunk shares what is cached of its prompt. What of it somebody holds costs nothing; what is free is taken
    from the free blocks like any other, once for all first chunks of the plan. Who will hold what is therefore kept
    account of: a block of a request that the plan pauses is free unless others hold it or the plan shares it already.

    available_blocks   free blocks of the pool, less what was spent, plus what was refunded
    """

    __slots__ = ("available_blocks", "_kv", "_refunded", "_shared", "_kept", "_kept_by_plan")

    def __init__(self, kv_cache_manager: "KvCacheManager") -> None:
        self._kv = kv_cache_manager
        self.available_blocks: int = kv_cache_manager.free_blocks
        self._refunded: Counter[int] = Counter()
        self._shared: set[PrefixNode] = set()
        self._kept: set[int] | None = None
        self._kept_by_plan: set[PrefixNode] = set()

    def fits(self, blocks: int) -> bool:
        return blocks <= self.available_blocks

    def spend(self, blocks: int, starting: LlmRequest | None = None) -> None:
        """Take blocks from the budget, with a first chunk for the request that starts with them."""
        self.available_blocks -= blocks
        if starting is not None and self._kv.cache is not None and not self._kv.owns(starting):
            found = self._kv.cache.shareable(starting)
            self._shared.update(found)
            self._kept_by_plan.update(found[self._kv.reservations.kept_columns(starting):])

    def is_refundable(self, request: LlmRequest) -> bool:
        """Whether a plan may count on this request's blocks. Not while a step that is in flight may read them."""
        return request.request_id not in self._kv.inflight_request_ids

    def refund(self, request: LlmRequest) -> None:
        """Count the blocks of a request that this plan pauses as free, but for those that stay in use."""
        assert self.is_refundable(request)
        owners = self._kv.owners_of(request)
        self._refunded.update(owners)
        shared = {node.block_id for node in self._shared}
        self.available_blocks += sum(
            self._refunded[block_id] == self._kv.pool.owners(block_id) and block_id not in shared
            for block_id in owners)

    def blocks_to_claim(self, request: LlmRequest) -> int:
        """Free blocks that a claim of this first chunk takes."""
        return self._kv.reservations.to_start(request) - len(self._in_use(request))

    def blocks_for_next_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Free blocks the request takes in its next step, every draft counted as accepted as far as the pool goes."""
        kv = self._kv
        if kv.owns(request):
            return kv.get_needed_blocks_one_step(request, two_step_lookahead)
        drafts = min(request.draft_len, max(kv.window.size + request.max_new_tokens - request.prompt_len, 0))
        with_drafts = min(kv.reservations.to_start(request, drafts), kv.num_blocks)
        return max(kv.reservations.to_start(request), with_drafts) - len(self._in_use(request))

    def blocks_for_next_step_of_generating(self, requests: Sequence[LlmRequest],
                                           two_step_lookahead: bool = False) -> int:
        """The sum over requests that all generate."""
        return self._kv.get_needed_blocks_one_step_of_generating(requests, two_step_lookahead)

    def blocks_to_completion(self, request: LlmRequest) -> int:
        """Free blocks the request takes until its last token, if those it has to itself now come free in a window."""
        if self._kv.owns(request):
            return self._kv.get_remaining_blocks_to_completion_of_owners([request])
        in_use = self._in_use(request)
        if self._kept is None:
            self._kept = self._kv.reservations.kept_blocks()
        if self._kept is not None:
            # Who slides past a shared block takes another for it, and does not free it.
            first_kept = self._kv.reservations.kept_columns(request)
            in_use = [place for place, node in in_use if place >= first_kept and (
                node.block_id in self._kept or node in self._kept_by_plan)]
        return self._kv.reservations.in_all(request) - len(in_use)

    def blocks_to_completion_of_started(self) -> int:
        """Free blocks that all who hold blocks take until their last tokens."""
        return self._kv.reservations.of_all_owners()

    def _in_use(self, request: LlmRequest) -> list[tuple[int, PrefixNode]]:
        """The cached blocks of the prompt that somebody will hold when the request is claimed, with their places."""
        cache = self._kv.cache
        if cache is None:
            return []
        return [(place, node) for place, node in enumerate(cache.shareable(request)) if node in self._shared or (
            node.block_id is not None and self._kv.pool.owners(node.block_id) > self._refunded[node.block_id])]
