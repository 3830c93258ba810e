"""The index of the prefix cache: a tree with one node per cached block.

The index finds a node by a keyed digest of the path from the root, and then compares the node's tokens, extra ids and
parent. Different prompts with equal digests are therefore distinguished, and the second of these prompts is not stored.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from os import urandom
from typing import Any, NamedTuple, Protocol

from ..kv_events import block_hash, root_hash

DIGEST_BITS = 256

Content = tuple[Any, ...]    # tokens, or pairs of a token and its extra id; comparable within one tree
Told = tuple[int, int, int | None]             # cache level, retention priority, task id of an adapter


class Domain(NamedTuple):
    """The properties that prompts must have in common to share blocks.

    adapter_id       digest of the content of the adapter, or None. A task id may name other content later
    cache_salt       the user's salt, which keeps prompts apart, or None
    uses_extra_ids   whether tokens have extra ids, for content that token ids do not distinguish
    """

    adapter_id: bytes | None = None
    cache_salt: Hashable = None
    uses_extra_ids: bool = False


class BlockKey(NamedTuple):
    """The key of a block: its content, and the digest of this content and of the blocks before it."""

    digest: bytes
    tokens: tuple[int, ...]
    extra_ids: tuple[int, ...] | None = None


class PrefixNode:
    """A node of the index: the content of one cached block, which is in the pool or in the host pool.

    parent     the node of the block before it; the root of the domain for a first block; None for a root
    domain     of a root; None for other nodes
    block_id   block of the content in the pool, or None
    host_id    host block of the content, or None
    told       what events have told last about the node, see EventLog; set by an observer
    name       the digest that names it in events; None: not computed yet
    """

    __slots__ = ("key", "parent", "domain", "children", "block_id", "host_id", "told", "name", "_in_order", "_contents")
    told: Told

    def __init__(self, key: BlockKey, parent: "PrefixNode | None", block_id: int | None = None,
                 domain: Domain | None = None) -> None:
        self.key = key
        self.parent = parent
        self.domain = domain
        self.name: bytes | None = None
        self.block_id = block_id
        self.host_id: int | None = None
        self.children: dict[bytes, PrefixNode] = {}
        self._in_order: list[PrefixNode] = []                # the children, ordered by content
        self._contents: list[Content] = []                   # their contents

    def child(self, key: BlockKey) -> "PrefixNode | None":
        """Return the child with exactly the content of `key`, or None."""
        found = self.children.get(key.digest)
        if found is None or found.key.tokens != key.tokens or found.key.extra_ids != key.extra_ids:
            return None
        return found

    def most_similar_child(self, tokens: Sequence[int],
                           extra_ids: Sequence[int] | None) -> "tuple[PrefixNode | None, int]":
        """Return the child with the longest common prefix with these tokens, and the length of this prefix.

        In lexical order, this child is next to the position at which the tokens would be inserted.
        """
        content = _content(tokens, extra_ids)
        index = bisect_left(self._contents, content)
        best, most = None, 0
        for neighbour in range(max(index - 1, 0), min(index + 1, len(self._contents))):
            length = _common_length(self._contents[neighbour], content)
            if length > most:
                best, most = self._in_order[neighbour], length
        return best, most

    def attach(self, child: "PrefixNode") -> None:
        content = _content(child.key.tokens, child.key.extra_ids)
        index = bisect_left(self._contents, content)
        self._contents.insert(index, content)
        self._in_order.insert(index, child)
        self.children[child.key.digest] = child

    def detach(self, child: "PrefixNode") -> None:
        index = bisect_left(self._contents, _content(child.key.tokens, child.key.extra_ids))
        assert self._in_order[index] is child
        del self._contents[index], self._in_order[index], self.children[child.key.digest]


class Observer(Protocol):
    """What is told of each change of an index, after it."""

    def stored(self, node: PrefixNode) -> None:
        """The content of `node` can be found."""

    def moved(self, node: PrefixNode) -> None:
        """The content of `node` is in another pool."""

    def removed(self, nodes: Sequence[PrefixNode]) -> None:
        """The contents of `nodes` cannot be found any more. Parents come before their children."""


class PrefixIndex:
    """Finds cached blocks in trees, one tree per domain. Only prompts of the same Domain share blocks.

    digest_bits   length of a digest; fewer than 256 only for tests, to provoke collisions
    nodes         block id -> node, for blocks of the pool
    version       number that changes with every insertion and removal
    observer      told of every change of what can be found, or None
    """

    def __init__(self, digest_bits: int = DIGEST_BITS) -> None:
        assert 1 <= digest_bits <= DIGEST_BITS
        self._secret = urandom(32)
        self._bits, self._size = digest_bits, (digest_bits + 7) // 8
        self.observer: Observer | None = None
        self._roots: dict[Domain, PrefixNode] = {}
        self.nodes: dict[int, PrefixNode] = {}
        self.num_nodes = 0
        self.version = 0

    # Digests.

    def root_digest(self, domain: Domain) -> bytes:
        return self._cut(root_hash(self._secret, *domain, size=self._size))

    def key(self, parent_digest: bytes, tokens: Sequence[int], extra_ids: Sequence[int] | None = None) -> BlockKey:
        """Return the key of a block with these tokens that follows the block with digest `parent_digest`."""
        digest = self._cut(block_hash(self._secret, parent_digest, tokens, extra_ids, size=self._size))
        return BlockKey(digest, tuple(tokens), None if extra_ids is None else tuple(extra_ids))

    def _cut(self, digest: bytes) -> bytes:
        return bytes([digest[0] & 0xFF >> -self._bits % 8]) + digest[1:]

    # Look-up.

    def root(self, domain: Domain) -> PrefixNode | None:
        return self._roots.get(domain)

    def walk(self, domain: Domain, keys: Sequence[BlockKey]) -> list[PrefixNode]:
        """Return the nodes of the blocks with `keys`, in order, up to the first key that is not in the index."""
        node = self._roots.get(domain)
        found: list[PrefixNode] = []
        if node is None:
            return found
        for key in keys:
            node = node.child(key)
            if node is None:
                break
            found.append(node)
        return found

    def of_block(self, block_id: int) -> PrefixNode | None:
        return self.nodes.get(block_id)

    def __iter__(self) -> Iterator[PrefixNode]:
        """Every node, parents before children."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    # Changes.

    def grow_root(self, domain: Domain) -> PrefixNode:
        """Return the root of a domain, created if necessary."""
        root = self._roots.get(domain)
        if root is None:
            root = self._roots[domain] = PrefixNode(BlockKey(self.root_digest(domain), ()), None, domain=domain)
        return root

    def insert(self, parent: PrefixNode, key: BlockKey, block_id: int | None,
               host_id: int | None = None) -> PrefixNode | None:
        """Add a node, whose content is in a block or in a host block, and return it.

        Returns None if the digest collides with other content, or if the block is in the index already.
        """
        if key.digest in parent.children or block_id in self.nodes:
            return None
        node = PrefixNode(key, parent, block_id)
        node.host_id = host_id
        if block_id is not None:
            self.nodes[block_id] = node
        parent.attach(node)
        self.num_nodes += 1
        self.version += 1
        if self.observer is not None:
            self.observer.stored(node)
        return node

    def move(self, node: PrefixNode, block_id: int | None, host_id: int | None) -> None:
        """Record that the content of a node moved to another block."""
        if node.block_id is not None:
            del self.nodes[node.block_id]
        node.block_id, node.host_id = block_id, host_id
        if block_id is not None:
            self.nodes[block_id] = node
        if self.observer is not None:
            self.observer.moved(node)

    def remove(self, node: PrefixNode) -> list[PrefixNode]:
        """Remove a node and all nodes below it, which become unreachable. Returns the removed nodes."""
        gone, waiting = [], [node]
        while waiting:
            below = waiting.pop()
            gone.append(below)
            waiting.extend(below.children.values())
            if below.block_id is not None:
                del self.nodes[below.block_id]
        self.num_nodes -= len(gone)
        self.version += 1

        parent = node.parent
        assert parent is not None                            # roots are not removed, they are dropped
        parent.detach(node)
        self.drop_empty_root(parent)
        if self.observer is not None:
            self.observer.removed(gone)
        return gone

    def drop_empty_root(self, node: PrefixNode) -> None:
        if node.domain is not None and not node.children and self._roots.get(node.domain) is node:
            del self._roots[node.domain]

    def faults(self) -> Iterator[str]:
        """Describe the inconsistencies of the trees."""
        nodes = list(self)
        if len(nodes) != self.num_nodes:
            yield f"{len(nodes)} prefix nodes are reachable, but num_nodes is {self.num_nodes}"
        if {node.block_id: node for node in nodes if node.block_id is not None} != self.nodes:
            yield "the prefix trees and the table of blocks differ"
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if parent.children.get(node.key.digest) is not node:
                yield f"the node of block {node.block_id} is not at its digest in its parent"
            if self.key(parent.key.digest, node.key.tokens, node.key.extra_ids) != node.key:
                yield f"the digest of block {node.block_id} does not match its content"
            if (node.block_id is None) == (node.host_id is None):
                yield f"a node is in block {node.block_id} and in host block {node.host_id}"


def _content(tokens: Sequence[int], extra_ids: Sequence[int] | None) -> Content:
    return tuple(tokens) if extra_ids is None else tuple(zip(tokens, extra_ids, strict=True))


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count
