"""The prefix cache: look-up, publication and eviction of computed blocks."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import counted
from ..handover import BlockCopy
from ..requests.llm_request import LlmRequest
from .block_pool import BlockPool
from .eviction import DEFAULT_PRIORITY
from .host_pool import HostPool
from .prefix_index import DIGEST_BITS, BlockKey, Domain, PrefixIndex, PrefixNode

if TYPE_CHECKING:
    from .event_log import EventLog


class PrefixCache:
    """Finds, publishes and evicts the blocks of a pool that have reusable content.

    A cached block without an owner is free. When the block is allocated, its content moves to the host pool if there is
    a host pool and the priority of the block is high enough. Otherwise the content is lost, together with the content
    of all cached blocks that follow this block.

    events            the log of its events, which attaches itself; or None
    ended             called with a request that has ended, and the nodes of its full blocks that can be found; or None
    copies            copies that the device makes before the next step, in order
    reused_blocks     number of blocks that prompts found in the cache
    evicted_blocks    number of evicted blocks whose content was lost, not moved to a host block
    """

    def __init__(self, pool: BlockPool, tokens_per_block: int, *, enable_partial_reuse: bool = True,
                 host_blocks: int = 0, digest_bits: int = DIGEST_BITS) -> None:
        self.pool = pool
        self.tokens_per_block = tokens_per_block
        self.enable_partial_reuse = enable_partial_reuse
        self.index = PrefixIndex(digest_bits)
        pool.findable = self.index.nodes
        self.host = HostPool(host_blocks)
        self.copies: list[BlockCopy] = []
        self.events: EventLog | None = None
        self.ended: Callable[[LlmRequest, Sequence[PrefixNode]], None] | None = None
        self.reused_blocks = 0
        self.evicted_blocks = 0
        self._keys: dict[int, tuple[LlmRequest, list[BlockKey]]] = {}
        self._walks: dict[int, tuple[LlmRequest, int, list[PrefixNode]]] = {}

    # Look-up. The digests of a request and its nodes are kept until the request is released.

    def matched(self, request: LlmRequest) -> list[PrefixNode]:
        """The leading full blocks of the prompt that are cached."""
        owner, version, nodes = self._walks.get(request.request_id, (None, 0, []))
        if owner is not request or version != self.index.version:
            keys = self._keys_of(request, request.prompt_len // self.tokens_per_block)
            nodes = self.index.walk(_domain(request), keys)
            self._walks[request.request_id] = request, self.index.version, nodes
        return nodes

    def shareable(self, request: LlmRequest) -> list[PrefixNode]:
        """The matched blocks that the request can share. They exclude the block of the last prompt token, because this
        token is always computed."""
        return self.matched(request)[:(request.prompt_len - 1) // self.tokens_per_block]

    def is_owned(self, node: PrefixNode) -> bool:
        """Whether a running sequence holds the block of `node`."""
        return node.block_id is not None and self.pool.owners(node.block_id) > 0

    def first_new_key(self, request: LlmRequest) -> bytes | None:
        """The digest of the prompt up to and including its first full block that is not cached.

        None if all full blocks are cached.
        """
        matched = len(self.matched(request))
        if matched == request.prompt_len // self.tokens_per_block:
            return None
        return self._keys_of(request, matched + 1)[matched].digest

    def will_publish_more(self, request: LlmRequest) -> bool:
        """Whether the first uncached full block of the prompt is published once the block is computed.

        The block of the last prompt token is not published while the request runs.
        """
        return len(self.matched(request)) < (request.prompt_len - 1) // self.tokens_per_block

    def similar(self, request: LlmRequest, matched: Sequence[PrefixNode]) -> tuple[PrefixNode | None, int]:
        """Return the cached block whose first tokens continue the prompt furthest after the blocks in `matched`, and
        the number of these tokens.

        Returns (None, 0) if no cached block continues the prompt. The last prompt token is not compared, because it is
        always computed. Without partial reuse, only a block that matches all compared tokens is returned.
        """
        parent = matched[-1] if matched else self.index.root(_domain(request))
        start = len(matched) * self.tokens_per_block
        end = min(start + self.tokens_per_block, request.prompt_len - 1)
        if parent is None or start == end:
            return None, 0
        tokens, extra_ids = self._content(request, start, end)
        exact = parent.child(self.index.key(parent.key.digest, tokens, extra_ids))
        if exact is not None:
            return exact, end - start
        return parent.most_similar_child(tokens, extra_ids) if self.enable_partial_reuse else (None, 0)

    def forget_request(self, request: LlmRequest) -> None:
        """Drop the stored digests and nodes of a request whose tokens change, or that has ended."""
        self._keys.pop(request.request_id, None)
        self._walks.pop(request.request_id, None)

    def domain_of(self, request: LlmRequest) -> Domain:
        """What a prompt must have in common with the request to share its blocks."""
        return _domain(request)

    def keys_of(self, request: LlmRequest, count: int) -> tuple[Domain, list[BlockKey]]:
        """Return the domain of a request that has not started, and the keys of its first `count` full blocks."""
        keys = self._keys_of(request, count)
        del self._keys[request.request_id]                     # it may never start
        return _domain(request), keys

    def _keys_of(self, request: LlmRequest, count: int) -> list[BlockKey]:
        """Return the cache key of each of the first `count` full blocks of the request's tokens."""
        owner, keys = self._keys.get(request.request_id, (None, []))
        if owner is not request:
            keys = []
            self._keys[request.request_id] = request, keys
        unit = self.tokens_per_block
        for index in range(len(keys), count):
            parent = keys[-1].digest if keys else self.index.root_digest(_domain(request))
            keys.append(self.index.key(parent, *self._content(request, index * unit, (index + 1) * unit)))
        return keys[:count]

    def _content(self, request: LlmRequest, start: int, end: int) -> tuple[list[int], list[int] | None]:
        extra_ids = request.token_extra_ids
        if extra_ids is not None:                              # generated tokens have the extra id 0
            extra_ids = list(extra_ids[start:end])
            extra_ids += [0] * (end - start - len(extra_ids))
        return request.tokens[0][start:end], extra_ids

    # Publication.

    def publish(self, request: LlmRequest, row: Sequence[int], num_tokens: int, with_rest: bool) -> None:
        """Make the first `num_tokens` tokens of a request, which are computed, reusable by other prompts.

        row         block ids of the request in token order, negative for released blocks
        with_rest   also publish a partly filled last block, which must not be written afterwards
        """
        full, rest = divmod(num_tokens, self.tokens_per_block)
        keys = self._keys_of(request, full)
        if self.events is not None:
            self.events.lora_task_id = request.lora_task_id
        node, chain = None, []
        for index in range(full + (1 if with_rest and rest else 0)):
            if index < full:
                key = keys[index]
            else:
                parent_digest = keys[-1].digest if keys else self.index.root_digest(_domain(request))
                key = self.index.key(parent_digest, *self._content(request, num_tokens - rest, num_tokens))
            if node is None:
                node = self.index.grow_root(_domain(request))
            child = node.child(key)
            if child is None and row[index] >= 0:
                child = self.index.insert(node, key, row[index])
            if child is None:
                break
            node = child
            chain.append(node)
        if node is not None:
            self.index.drop_empty_root(node)
        if with_rest and self.ended is not None and chain[:full]:
            self.ended(request, chain[:full])

    def offer(self, request: LlmRequest, num_tokens: int) -> None:
        """Call `ended` for the full blocks of the first `num_tokens` tokens that are published."""
        if self.ended is not None:
            keys = self._keys_of(request, num_tokens // self.tokens_per_block)
            if chain := self.index.walk(_domain(request), keys):
                self.ended(request, chain)

    # Eviction.

    def take(self, count: int) -> list[int]:
        """Allocate blocks of the pool. Their cached content moves to the host or is lost. Raises OutOfBlocksError."""
        if count > 1 and self.pool.has_priorities and count <= len(self.pool.free):
            # When the content of a block is lost, other blocks may move to the front of the order.
            return [block_id for _ in range(count) for block_id in self.take(1)]
        taken = self.pool.take(count)
        for block_id in taken:
            node = self.index.of_block(block_id)
            if node is not None and not self._moved_to_host(node, block_id):
                self.evicted_blocks += self._lose(node)
        return taken

    def _moved_to_host(self, node: PrefixNode, block_id: int) -> bool:
        if self.host.num_blocks == 0 or not self.pool.is_offloadable(block_id):
            return False
        priority = self.pool.priority(block_id)
        in_the_way = self.host.make_way(priority)
        if in_the_way is not None:
            self.evicted_blocks += self._lose(in_the_way)
            if node.block_id is None:
                return True                                    # it followed that block, and is lost with it
        host_id = self.host.put(node, priority)
        if host_id is None:
            return False
        self.copies.append(BlockCopy(block_id, host_id, len(node.key.tokens), to_host=True))
        self.index.move(node, None, host_id)
        return True

    # Content that comes from elsewhere, or goes there.

    def reserve_host(self, count: int) -> list[int]:
        """Reserve up to `count` host blocks. The content of unpinned ones is lost, lowest priority first, if it has at
        most the default priority.
        """
        reserved: list[int] = []
        while len(reserved) < count:
            host_id = self.host.reserve()
            if host_id is not None:
                reserved.append(host_id)
                continue
            in_the_way = self.host.make_way(DEFAULT_PRIORITY)
            if in_the_way is None:
                break
            self.evicted_blocks += self._lose(in_the_way)
        return reserved

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies that the device must make before any other, and forget them."""
        copies, self.copies = self.copies, []
        return copies

    def take_in(self, domain: Domain, keys: Sequence[BlockKey], start: int, host_ids: Sequence[int],
                lora_task_id: int | None) -> list[int]:
        """Make reserved host blocks findable that have the contents of `keys` from `start` on.

        lora_task_id   that of a request for which they were loaded

        Returns those of `host_ids` that were not taken. They stay reserved: another block with the content can be found
        already, or the block that they follow cannot be found any more.
        """
        found = self.index.walk(domain, keys)
        known = len(found) - start
        if not 0 <= known < len(host_ids):
            return list(host_ids)
        if self.events is not None:
            self.events.lora_task_id = lora_task_id
        node = found[-1] if found else self.index.grow_root(domain)
        for place, (key, host_id) in enumerate(zip(keys[len(found):], host_ids[known:], strict=False), known):
            child = self.index.insert(node, key, None, host_id)
            if child is None:
                self.index.drop_empty_root(node)
                return [*host_ids[:known], *host_ids[place:]]
            self.host.fill(host_id, child)
            node = child
        return list(host_ids[:known])

    def bring_back(self, node: PrefixNode) -> None:
        """Move the content of `node` from its host block to a new block of the pool.

        Call `HostPool.pin` for the host block first, so that taking the new block does not replace its content.
        """
        host_id = node.host_id
        assert host_id is not None
        (block_id,) = self.take(1)
        self.pool.set_priority(block_id, self.host.priority(host_id))
        self.copies.append(BlockCopy(host_id, block_id, len(node.key.tokens), from_host=True))
        self.host.drop(host_id)
        self.index.move(node, block_id, None)

    def _lose(self, node: PrefixNode) -> int:
        """Remove a node and all nodes below it from the cache. Returns the number of removed nodes."""
        gone = self.index.remove(node)
        self.pool.note_contents_lost([below.block_id for below in gone if below.block_id is not None])
        for below in gone:
            if below.host_id is not None:
                self.host.drop(below.host_id)
            below.block_id = below.host_id = None
        return len(gone)

    def take_over(self, node: PrefixNode) -> int:
        """Allocate the block of `node` to an owner that may write to the block. Returns the block id.

        The block must have no owner. It keeps its content. The cache removes `node` and all nodes below it.
        """
        block_id = node.block_id
        assert block_id is not None
        self.pool.share(block_id)
        self.evicted_blocks += self._lose(node) - 1
        return block_id

    def faults(self) -> Iterator[str]:
        """Describe the inconsistencies of the cache."""
        yield from self.index.faults()
        yield from self.host.faults()
        for node in self.index:
            if node.host_id is not None and node not in self.host:
                yield f"host block {node.host_id} is not registered for its node"
            if self.is_owned(node) and len(node.key.tokens) != self.tokens_per_block:
                yield f"block {node.block_id} is shared and not full"
            if not 0 < len(node.key.tokens) <= self.tokens_per_block:
                yield f"a node has {counted(len(node.key.tokens), 'token')}"


def _domain(request: LlmRequest) -> Domain:
    return Domain(request.adapter_digest, request.cache_salt, request.token_extra_ids is not None)
