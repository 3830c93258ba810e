"""The order in which free blocks are allocated and their content is evicted.

    priority    retention priority of a block, 0..100; free blocks of low priority are allocated first
    duration    seconds after the release of a block until its priority becomes the default, 35; None: never
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count

LOWEST_PRIORITY, HIGHEST_PRIORITY = 0, 100
DEFAULT_PRIORITY = 35
OFFLOAD_PRIORITY = 30


class EvictionOrder:
    """Free blocks, ordered by priority and then by the time of release, oldest first.

    A block keeps its priority while it is in use; `refresh` resets expired priorities to the default.
    """

    def __init__(self, block_ids: Iterable[int] = (), now: Callable[[], float] = lambda: 0.0) -> None:
        self._default: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)
        self._queues = {DEFAULT_PRIORITY: self._default}     # only the default queue may be empty
        self._priorities: dict[int, int] = {}                # only priorities other than the default
        self._durations: dict[int, float] = {}
        self._deadlines: dict[int, tuple[float, int]] = {}   # free block -> (time, order of arrival)
        self._deadline_heap: list[tuple[tuple[float, int], int]] = []
        self._arrivals = count()
        self._now = now

    def __len__(self) -> int:
        if len(self._queues) == 1:
            return len(self._default)
        return sum(map(len, self._queues.values()))

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._queues.get(self.priority(block_id), ())

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._queues[priority] for priority in sorted(self._queues))

    def priority(self, block_id: int) -> int:
        return self._priorities.get(block_id, DEFAULT_PRIORITY)

    def is_offloadable(self, block_id: int) -> bool:
        """Whether to copy the content of the block to the host when it is evicted."""
        return self.priority(block_id) >= OFFLOAD_PRIORITY

    def first(self) -> int | None:
        """The block that is allocated next; None if there is no block."""
        return next(iter(self), None)

    def popitem(self, wanted: int = 1) -> list[int]:
        """Remove and return the first `wanted` blocks of the order, which must have at least `wanted` blocks."""
        taken: list[int] = []
        while len(taken) < wanted:
            priority = min(self._queues) if self._default else min(filter(self._queues.get, self._queues))
            queue = self._queues[priority]
            taken += [queue.popitem(last=False)[0] for _ in range(min(wanted - len(taken), len(queue)))]
            self._drop_if_empty(priority)
        if self._deadlines:
            for block_id in taken:
                self._deadlines.pop(block_id, None)
        return taken

    def remove(self, block_id: int) -> None:
        """Remove one block from the order."""
        priority = self.priority(block_id)
        del self._queues[priority][block_id]
        self._drop_if_empty(priority)
        self._deadlines.pop(block_id, None)

    def append(self, block_id: int, front: bool = False) -> None:
        """Add a block after all blocks of its priority, or with `front` before them."""
        queue = self._default
        if self._priorities:
            queue = self._queues.setdefault(self.priority(block_id), OrderedDict())
        queue[block_id] = None
        if front:
            queue.move_to_end(block_id, last=False)
        if block_id in self._durations:
            deadline = self._now() + self._durations[block_id], next(self._arrivals)
            self._deadlines[block_id] = deadline
            heappush(self._deadline_heap, (deadline, block_id))
            if len(self._deadline_heap) > 2 * len(self._deadlines) + 64:    # most entries are stale
                self._deadline_heap = [(deadline, block_id) for block_id, deadline in self._deadlines.items()]
                heapify(self._deadline_heap)

    def set_priority(self, block_id: int, priority: int, duration: float | None = None) -> None:
        """Set the priority of a block that is not in the order. `duration` begins when the block is appended."""
        if priority == DEFAULT_PRIORITY:
            self._priorities.pop(block_id, None)
        else:
            self._priorities[block_id] = priority
        if duration is None or priority == DEFAULT_PRIORITY:    # an expired priority returns to the default anyway
            self._durations.pop(block_id, None)
        else:
            self._durations[block_id] = duration

    def refresh(self) -> list[int]:
        """Give each block whose priority has expired the default priority. Returns these blocks.

        In the order, these blocks come after all blocks that already have the default priority.
        """
        ended: list[int] = []
        if not self._deadline_heap:
            return ended
        now = self._now()
        while self._deadline_heap and self._deadline_heap[0][0][0] <= now:
            deadline, block_id = heappop(self._deadline_heap)
            if self._deadlines.get(block_id) == deadline:
                self.remove(block_id)
                self.set_priority(block_id, DEFAULT_PRIORITY)
                self._default[block_id] = None
                ended.append(block_id)
        return ended

    def _drop_if_empty(self, priority: int) -> None:
        if priority != DEFAULT_PRIORITY and not self._queues[priority]:
            del self._queues[priority]
