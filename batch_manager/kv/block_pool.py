"""The pool of blocks: the free blocks in the order of allocation, and the owner counts of the other blocks."""

from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import InternalError, OutOfResourceError
from .eviction import DEFAULT_PRIORITY, EvictionOrder


class OutOfBlocksError(OutOfResourceError):
    """A claim needs more blocks than are free."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted:,} free KV cache blocks are needed, and the pool has {free:,}")


class BlockPool:
    """A fixed number of blocks, each free or owned. An owner is one entry of a block table.

    Without priorities, free blocks are allocated first in, first out. A new pool allocates 0, 1, 2, and so on.
    Blocks that are released together are allocated together. The blocks of a prompt are therefore adjacent until the
    pool is fragmented.

    free           blocks without an owner, in the order of allocation
    extra_owners   owners beyond the first, summed over all blocks
    findable       blocks whose content the prefix cache can find. When the cache loses the content of blocks, it
                   calls `note_contents_lost`
    num_cached     free blocks that are findable
    has_priorities         whether a priority other than the default was ever set
    priority_changed       from then on, called with a block and its priority after that was set or has expired
    has_timed_priorities   whether a priority with a duration was ever set
    """

    def __init__(self, num_blocks: int, now: Callable[[], float] = lambda: 0.0) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.free = EvictionOrder(range(num_blocks), now)
        self.has_priorities = self.has_timed_priorities = False
        self.extra_owners = 0
        self.findable: Collection[int] = ()
        self.priority_changed: Callable[[int, int], None] | None = None
        self.num_cached = 0
        self._owners = [0] * num_blocks

    @property
    def num_live(self) -> int:
        """Number of blocks with at least one owner. Slow: reads the owner count of every block."""
        return self.num_blocks - self._owners.count(0)

    def free_order(self) -> list[int]:
        """The free blocks in the order of allocation."""
        return list(self.free)

    def owners(self, block_id: int) -> int:
        return self._owners[block_id]

    def first_free(self) -> int | None:
        """The block that is allocated next; None if no block is free."""
        return self.free.first()

    def priority(self, block_id: int) -> int:
        """Retention priority of the block, 0..100."""
        return self.free.priority(block_id)

    def is_offloadable(self, block_id: int) -> bool:
        """Whether to copy the content of the block to the host when it is evicted."""
        return self.free.is_offloadable(block_id)

    def set_priority(self, block_id: int, priority: int, duration: float | None = None) -> None:
        """Set the retention priority, 0..100, of a block with an owner.

        duration   how long the priority holds after the release of the block, in seconds; None: for ever
        """
        self.has_priorities = self.has_priorities or priority != DEFAULT_PRIORITY
        self.has_timed_priorities = self.has_timed_priorities or duration is not None
        self.free.set_priority(block_id, priority, duration)
        if self.has_priorities and self.priority_changed is not None:
            self.priority_changed(block_id, priority)

    def end_timed_priorities(self) -> None:
        """Reset expired priorities of free blocks to the default. These blocks move after all free blocks of the
        default priority."""
        ended = self.free.refresh()
        if self.priority_changed is not None:
            for block_id in ended:
                self.priority_changed(block_id, DEFAULT_PRIORITY)

    def note_contents_lost(self, block_ids: Iterable[int]) -> None:
        """Note that the prefix cache can no longer find the content of these blocks.

        A free block of `block_ids` whose priority is not the default gets the default priority. The blocks whose
        priority changed move before all other free blocks of the default priority, lowest id first.
        """
        free = [block_id for block_id in block_ids if not self._owners[block_id]]
        self.num_cached -= len(free)
        if self.has_priorities:
            for block_id in sorted(free, reverse=True):
                if self.free.priority(block_id) != DEFAULT_PRIORITY:
                    self.free.remove(block_id)
                    self.free.set_priority(block_id, DEFAULT_PRIORITY)
                    self.free.append(block_id, front=True)

    def take(self, count: int) -> list[int]:
        """Allocate `count` free blocks. Raises OutOfBlocksError, with nothing changed, if fewer blocks are free."""
        owners = self._owners
        if count > len(self.free):
            raise OutOfBlocksError(count, len(self.free))
        taken = self.free.popitem(count)
        for block_id in taken:
            owners[block_id] = 1
        if self.findable:
            self.num_cached -= sum(block_id in self.findable for block_id in taken)
        return taken

    def share(self, block_id: int) -> None:
        """Add an owner to a block, which may be free. The block keeps its content."""
        if self._owners[block_id]:
            self.extra_owners += 1
        else:
            self.free.remove(block_id)
            self.num_cached -= block_id in self.findable
        self._owners[block_id] += 1

    def give_back(self, block_ids: Sequence[int], front: bool = False) -> None:
        """Remove one owner from each block. A block that loses its last owner becomes free, and comes after all free
        blocks of its priority.

        front   add each of these blocks before all free blocks of its priority, so that the last of `block_ids` comes
                first

        Raises InternalError, with nothing changed, if a block has no owner or occurs twice.
        """
        owners = self._owners
        unowned = [block_id for block_id in block_ids if owners[block_id] == 0]
        if unowned or len(set(block_ids)) != len(block_ids):
            raise InternalError(f"blocks {unowned or list(block_ids)} were released; one has no owner or occurs twice",
                                "each owner releases a block once")
        for block_id in block_ids:
            owners[block_id] -= 1
            if owners[block_id] == 0:
                self.free.append(block_id, front)
                self.num_cached += block_id in self.findable
            else:
                self.extra_owners -= 1

    def faults(self) -> Iterable[str]:
        """Describe the inconsistencies of the pool."""
        free = list(self.free)
        for block_id, owners in enumerate(self._owners):
            if owners < 0 or (owners == 0) != (block_id in self.free):
                yield f"block {block_id} has {owners} owners and is {'' if block_id in self.free else 'not '}free"
        if any(not 0 <= block_id < self.num_blocks for block_id in free) or len(set(free)) != len(free):
            yield "the free order has a block that does not exist, or a block twice"
        cached = sum(block_id in self.findable for block_id in free)
        if cached != self.num_cached:
            yield f"{cached} free blocks can be found, but num_cached is {self.num_cached}"
        extra = sum(owners - 1 for owners in self._owners if owners)
        if extra != self.extra_owners:
            yield f"blocks have {extra} owners beyond the first, but extra_owners is {self.extra_owners}"
