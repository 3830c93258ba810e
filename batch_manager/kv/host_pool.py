"""The accounting of host blocks, which form a second pool for the content of evicted blocks."""

from collections.abc import Iterator

from .eviction import DEFAULT_PRIORITY, EvictionOrder
from .prefix_index import PrefixNode


class HostPool:
    """Host blocks, each empty, with the content of one node of the prefix index, or reserved for a store's traffic.

    When first chunks take their blocks (`PrefixClaim`), they pin the host blocks whose content they reuse. If all
    blocks are full, new content replaces the content of an unpinned block: the oldest one of the lowest priority.
    If the priority of the new content is even lower, the new content is not stored.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._order = EvictionOrder()
        self._nodes: dict[int, PrefixNode] = {}
        self._reserved: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._empty)

    def __contains__(self, node: PrefixNode) -> bool:
        return node.host_id is not None and self._nodes.get(node.host_id) is node

    def make_way(self, priority: int) -> PrefixNode | None:
        """Return the node of the prefix index whose host block must be emptied to store content of `priority`.

        Returns None if a host block is empty, or if all unpinned nodes have a higher priority.
        """
        if self._empty:
            return None
        first = self._order.first()
        return None if first is None or self._order.priority(first) > priority else self._nodes[first]

    def put(self, node: PrefixNode, priority: int) -> int | None:
        """Assign an empty host block to the content of a node of the prefix index, and return the id of the block.

        Returns None if no host block is empty.
        """
        if not self._empty:
            return None
        host_id = self._empty.pop()
        self._nodes[host_id] = node
        self._order.set_priority(host_id, priority)
        self._order.append(host_id)
        return host_id

    def reserve(self) -> int | None:
        """Take an empty host block for other content than a node's. None: there is none."""
        if not self._empty:
            return None
        host_id = self._empty.pop()
        self._reserved.add(host_id)
        self._order.set_priority(host_id, DEFAULT_PRIORITY)
        return host_id

    def release(self, host_id: int) -> None:
        """Give a reserved host block back."""
        self._reserved.remove(host_id)
        self._empty.append(host_id)

    def fill(self, host_id: int, node: PrefixNode) -> None:
        """Assign a reserved host block, which has the content of `node`, to it."""
        self._reserved.remove(host_id)
        self._nodes[host_id] = node
        self._order.append(host_id)

    def priority(self, host_id: int) -> int:
        return self._order.priority(host_id)

    def pin(self, host_id: int) -> None:
        """Keep the content of a host block until it is unpinned or dropped."""
        if host_id in self._order:
            self._order.remove(host_id)

    def unpin(self, host_id: int) -> None:
        if host_id in self._nodes and host_id not in self._order:
            self._order.append(host_id)

    def drop(self, host_id: int) -> None:
        """Empty a host block."""
        self.pin(host_id)
        del self._nodes[host_id]
        self._empty.append(host_id)

    def faults(self) -> Iterator[str]:
        if sorted([*self._empty, *self._nodes, *self._reserved]) != list(range(self.num_blocks)):
            yield "a host block is not exactly one of empty, full and reserved"
        if sorted(self._order) != sorted(self._nodes):
            yield "a host block is still pinned, or ordered without content"
        for host_id, node in self._nodes.items():
            if node.host_id != host_id:
                yield f"host block {host_id} belongs to a node with host_id {node.host_id}"
