"""Starts sequences with what is cached of their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..handover import BlockCopy
from ..requests.llm_request import LlmRequest
from .block_needs import blocks_of_prompt, ceil_div
from .prefix_cache import PrefixCache
from .prefix_index import PrefixNode
from .retention import retain_prompt


@dataclass(frozen=True, slots=True)
class Start:
    """What a sequence starts with.

    block_ids       in token order; with beams the last ones are the last block of each
    reused_tokens   tokens at the front that need not be computed
    """

    block_ids: list[int]
    reused_tokens: int


class PrefixClaim:
    """One claim for several first chunks; there must be enough free blocks for what `needed` says.

    Everything cached that any of them will use is protected before the first new block is taken, so that what was
    found when the step was planned is still there. What is copied from is protected until there is a block to copy to.
    """

    def __init__(self, cache: PrefixCache, requests: Sequence[LlmRequest], taken_elsewhere: int) -> None:
        self._cache, self._pool = cache, cache.pool
        self._requests = requests
        self._found = [cache.shareable(request) for request in requests]
        self._unowned = {node for nodes in self._found for node in nodes if not cache.is_owned(node)}
        self._left = taken_elsewhere + sum(
            blocks_of_prompt(request.prompt_len, cache.tokens_per_block, request.beam_width, own_last=True) - len(nodes)
            for request, nodes in zip(requests, self._found, strict=True))
        self._pinned: list[int] = []

    @property
    def needed(self) -> int:
        """Free blocks that all of it takes, those taken elsewhere in the same step included."""
        return self._left + len(self._unowned)

    def start(self) -> list[Start]:
        """One for each request."""
        self._protect()
        starts = [self._start(request, nodes) for request, nodes in zip(self._requests, self._found, strict=True)]
        for host_id in self._pinned:
            self._cache.host.unpin(host_id)
        return starts

    def _protect(self) -> None:
        in_host = []
        for node in (node for nodes in self._found for node in nodes):
            if node.block_id is None:
                self._cache.host.pin(node.host_id)
                in_host.append(node)
            else:
                self._pool.share(node.block_id)
        for node in in_host:
            if node.block_id is None:
                self._cache.bring_back(node)
            else:
                self._pool.share(node.block_id)

    def _start(self, request: LlmRequest, nodes: list[PrefixNode]) -> Start:
        unit, beams = self._cache.tokens_per_block, request.beam_width
        total = ceil_div(request.prompt_len, unit)
        block_ids = [node.block_id for node in nodes]
        reused_tokens = len(nodes) * unit

        if beams == 1 or len(nodes) < total - 1:
            node, num_tokens = self._cache.similar(request, nodes)
            block_id = self._begun(node, num_tokens) if num_tokens else None
            if block_id is not None:
                block_ids.append(block_id)
                reused_tokens += num_tokens
        found = len(block_ids)
        block_ids += self._take(total - 1 + beams - found)

        retain_prompt(self._pool, request, block_ids, found, unit)
        for block_id in block_ids[:total - 1] * (beams - 1):
            self._pool.share(block_id)
        self._cache.reused_blocks += found
        return Start(block_ids, reused_tokens)

    def _begun(self, node: PrefixNode, num_tokens: int) -> int | None:
        """A block to write to that has these tokens of the node; None when there is none to be had."""
        source = node.block_id
        if source is None:
            self._cache.host.pin(node.host_id)
            self._pinned.append(node.host_id)
            (block_id,) = self._take(1)
            self._pool.set_priority(block_id, self._cache.host.priority(node.host_id))
            self._cache.copies.append(BlockCopy(node.host_id, block_id, num_tokens, from_host=True))
            return block_id
        if not self._cache.is_owned(node) and (not node.children or self._pool.num_free == 1):
            self._left -= 1
            return self._cache.take_over(node)
        self._pool.share(source)
        (block_id,) = self._take(1)
        self._pool.set_priority(block_id, self._pool.priority(source))
        self._cache.copies.append(BlockCopy(source, block_id, num_tokens))
        self._pool.give_back([source])     # copies are made in order, before the step writes to what was taken since
        return block_id

    def _take(self, count: int) -> list[int]:
        self._left -= count
        return self._cache.take(count)
