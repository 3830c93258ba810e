"""The content of earlier prompts that blocks still hold: look-ups, publication, overwriting."""

from collections.abc import Iterator, Sequence

from ..handover import BlockCopy
from ..requests.llm_request import LlmRequest
from .block_pool import BlockPool
from .host_pool import HostPool
from .prefix_index import DIGEST_BITS, BlockKey, Domain, PrefixIndex, PrefixNode


class PrefixCache:
    """Blocks of a pool whose content may be used again.

    A cached block without an owner is free like any other. When it is handed out, its content moves to the host's pool
    if there is one and the content is worth it; otherwise it is lost, and with it all blocks that follow it.

    copies            for the device to make before the next step, in order
    reused_blocks     blocks that prompts did not have to compute
    evicted_blocks    blocks whose content was lost while it could be found
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
        self.reused_blocks = 0
        self.evicted_blocks = 0
        self._keys: dict[int, tuple[LlmRequest, list[BlockKey]]] = {}
        self._walks: dict[int, tuple[LlmRequest, int, list[PrefixNode]]] = {}

    # Looking up. A request's digests and the nodes found for it are kept until the request is released.

    def matched(self, request: LlmRequest) -> list[PrefixNode]:
        """The full blocks of the prompt that are cached, from the first on."""
        owner, version, nodes = self._walks.get(request.request_id, (None, 0, []))
        if owner is not request or version != self.index.version:
            keys = self._keys_of(request, request.prompt_len // self.tokens_per_block)
            nodes = self.index.walk(_domain(request), keys)
            self._walks[request.request_id] = request, self.index.version, nodes
        return nodes

    def shareable(self, request: LlmRequest) -> list[PrefixNode]:
        """Those of them that the request can use. The last token of a prompt is always computed, so its block is never
        one."""
        return self.matched(request)[:(request.prompt_len - 1) // self.tokens_per_block]

    def is_owned(self, node: PrefixNode) -> bool:
        """Whether a running sequence holds the block."""
        return node.block_id is not None and self.pool.owners(node.block_id) > 0

    def first_new_key(self, request: LlmRequest) -> bytes | None:
        """The digest of the prompt up to and including its first full block that is not cached; None: there is none."""
        matched = len(self.matched(request))
        if matched == request.prompt_len // self.tokens_per_block:
            return None
        return self._keys_of(request, matched + 1)[matched].digest

    def will_publish_more(self, request: LlmRequest) -> bool:
        """Whether that block can be found when the prompt is computed. The block of the last token cannot be found
        while the request runs."""
        return len(self.matched(request)) < (request.prompt_len - 1) // self.tokens_per_block

    def similar(self, request: LlmRequest, matched: Sequence[PrefixNode]) -> tuple[PrefixNode | None, int]:
        """The block that has the most of the tokens after the matched ones, and how many of them."""
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
        """The tokens of the request are about to change, or the request has ended."""
        self._keys.pop(request.request_id, None)
        self._walks.pop(request.request_id, None)

    def _keys_of(self, request: LlmRequest, count: int) -> list[BlockKey]:
        """The keys of the first full blocks of the request's tokens."""
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

    # Publishing.

    def publish(self, request: LlmRequest, row: Sequence[int], num_tokens: int, with_rest: bool) -> None:
        """Let other prompts find the first tokens of a request, which are computed and in these blocks.

        row         its blocks in token order, negative where it has released one
        with_rest   also a last block that is not full; it must not be written to afterwards
        """
        full, rest = divmod(num_tokens, self.tokens_per_block)
        keys = self._keys_of(request, full)
        node = None
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
        if node is not None:
            self.index.drop_empty_root(node)

    # Overwriting.

    def take(self, count: int) -> list[int]:
        """Take blocks from the pool. Their content is moved or lost.

        Raises OutOfBlocksError.
        """
        if count > 1 and self.pool.has_priorities and count <= len(self.pool.free):
            # Losing the content of one may move others to the front of the order.
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
                return True                                    # it was below that one, and is lost already
        host_id = self.host.put(node, priority)
        if host_id is None:
            return False
        self.copies.append(BlockCopy(block_id, host_id, len(node.key.tokens), to_host=True))
        self.index.move(node, None, host_id)
        return True

    def bring_back(self, node: PrefixNode) -> None:
        """Bring the content of a host block back to a block of the pool. The node must be pinned."""
        host_id = node.host_id
        assert host_id is not None
        (block_id,) = self.take(1)
        self.pool.set_priority(block_id, self.host.priority(host_id))
        self.copies.append(BlockCopy(host_id, block_id, len(node.key.tokens), from_host=True))
        self.host.drop(host_id)
        self.index.move(node, block_id, None)

    def _lose(self, node: PrefixNode) -> int:
        """Make the content, and all that follows it, impossible to find. Returns how many blocks those were."""
        gone = self.index.remove(node)
        self.pool.note_contents_lost([below.block_id for below in gone if below.block_id is not None])
        for below in gone:
            if below.host_id is not None:
                self.host.drop(below.host_id)
            below.block_id = below.host_id = None
        return len(gone)

    def take_over(self, node: PrefixNode) -> int:
        """Give a block without an owner, with its content, to one owner that may write to it."""
        block_id = node.block_id
        assert block_id is not None
        self.pool.share(block_id)
        self.evicted_blocks += self._lose(node) - 1
        return block_id

    def faults(self) -> Iterator[str]:
        """What is wrong, in words."""
        yield from self.index.faults()
        yield from self.host.faults()
        for node in self.index:
            if node.host_id is not None and node not in self.host:
                yield f"host block {node.host_id} does not know its node"
            if self.is_owned(node) and len(node.key.tokens) != self.tokens_per_block:
                yield f"block {node.block_id} is shared and not full"
            if not 0 < len(node.key.tokens) <= self.tokens_per_block:
                yield f"a node has {len(node.key.tokens)} tokens"


def _domain(request: LlmRequest) -> Domain:
    return Domain(request.lora_task_id, request.cache_salt, request.token_extra_ids is not None)
