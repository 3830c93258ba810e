"""The free blocks, in the order in which they will be handed out, and the numbers of owners of the others."""

from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import InternalError, OutOfResourceError
from .eviction import DEFAULT_PRIORITY, EvictionOrder


class OutOfBlocksError(OutOfResourceError):
    """More blocks were asked for than are free."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} KV cache blocks were asked for and {free} are free")


class BlockPool:
    """A fixed number of blocks, each free or owned; an owner is one entry of a block table.

    Without priorities the free order is first in, first out: a fresh pool hands out 0, 1, 2, ..., and blocks released
    together are handed out together, so that the blocks of one prompt are consecutive until the pool is fragmented.

    free           blocks without an owner, in the order in which they will be handed out
    extra_owners   owners beyond the first, over all blocks
    findable       blocks whose content a prefix cache can find; the cache reports free ones that it no longer finds
    num_cached     those of them that are free
    has_priorities         a priority other than the default has been set
    has_timed_priorities   a priority that ends with time has been set
    """

    def __init__(self, num_blocks: int, now: Callable[[], float] = lambda: 0.0) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.free = EvictionOrder(range(num_blocks), now)
        self.has_priorities = self.has_timed_priorities = False
        self.extra_owners = 0
        self.findable: Collection[int] = ()
        self.num_cached = 0
        self._owners = [0] * num_blocks

    @property
    def num_live(self) -> int:
        """Blocks with at least one owner, counted."""
        return self.num_blocks - self._owners.count(0)

    def free_order(self) -> list[int]:
        """The free blocks, the next one to be handed out first."""
        return list(self.free)

    def owners(self, block_id: int) -> int:
        return self._owners[block_id]

    def first_free(self) -> int | None:
        """The block that would be handed out next."""
        return self.free.first()

    def priority(self, block_id: int) -> int:
        """How long the content of the block should be kept, 0..100."""
        return self.free.priority(block_id)

    def is_offloadable(self, block_id: int) -> bool:
        """Whether the content of the block is worth a copy when the block is handed out."""
        return self.free.is_offloadable(block_id)

    def set_priority(self, block_id: int, priority: int, duration: float | None = None) -> None:
        """For a block with an owner. The duration counts from the moment when it has none any more; None: for ever."""
        self.has_priorities = self.has_priorities or priority != DEFAULT_PRIORITY
        self.has_timed_priorities = self.has_timed_priorities or duration is not None
        self.free.set_priority(block_id, priority, duration)

    def end_timed_priorities(self) -> None:
        """Move free blocks whose priority has expired to the end of the default priority."""
        self.free.refresh()

    def note_contents_lost(self, block_ids: Iterable[int]) -> None:
        """The content of these blocks can no longer be found. The free ones among them whose priority is not the
        default move to the front of the default priority, the lowest id first."""
        free = [block_id for block_id in block_ids if not self._owners[block_id]]
        self.num_cached -= len(free)
        if self.has_priorities:
            for block_id in sorted(free, reverse=True):
                if self.free.priority(block_id) != DEFAULT_PRIORITY:
                    self.free.remove(block_id)
                    self.free.set_priority(block_id, DEFAULT_PRIORITY)
                    self.free.append(block_id, front=True)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free order, or none at all.

        Raises OutOfBlocksError.
        """
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
        """Add an owner to a block, free or not. Its content stays as it is."""
        if self._owners[block_id]:
            self.extra_owners += 1
        else:
            self.free.remove(block_id)
            self.num_cached -= block_id in self.findable
        self._owners[block_id] += 1

    def give_back(self, block_ids: Sequence[int], front: bool = False) -> None:
        """Remove one owner from each of these blocks; those without an owner go to the end of the free order.

        front   they go to the front instead, the last one first

        Raises InternalError when a block has no owner or is named twice; nothing is changed then.
        """
        owners = self._owners
        unowned = [block_id for block_id in block_ids if owners[block_id] == 0]
        if unowned or len(set(block_ids)) != len(block_ids):
            raise InternalError(f"blocks {unowned or list(block_ids)} were given back twice",
                                "a block is given back once by each of its owners")
        for block_id in block_ids:
            owners[block_id] -= 1
            if owners[block_id] == 0:
                self.free.append(block_id, front)
                self.num_cached += block_id in self.findable
            else:
                self.extra_owners -= 1

    def faults(self) -> Iterable[str]:
        """What is wrong with the pool, in words."""
        free = list(self.free)
        for block_id, owners in enumerate(self._owners):
            if owners < 0 or (owners == 0) != (block_id in self.free):
                yield f"block {block_id} has {owners} owners and is {'' if block_id in self.free else 'not '}free"
        if any(not 0 <= block_id < self.num_blocks for block_id in free) or len(set(free)) != len(free):
            yield "the free order names a block that does not exist, or one twice"
        cached = sum(block_id in self.findable for block_id in free)
        if cached != self.num_cached:
            yield f"{cached} free blocks can be found and {self.num_cached} were counted"
        extra = sum(owners - 1 for owners in self._owners if owners)
        if extra != self.extra_owners:
            yield f"{extra} owners are beyond the first and {self.extra_owners} were counted"
