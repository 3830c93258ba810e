"""Accepted requests until they become active: in a queue, or while their adapters or blocks are prepared."""

from collections import deque
from collections.abc import Set

from ..errors import RequestError
from ..requests.admission import Admitted
from ..stores.stored_blocks import StoredBlocks
from .preparing import Preparing


class WaitingRequests:
    """The queue of accepted requests, and those that wait for their adapters or blocks before they enter it.

    queue          by priority, larger first; requests of equal priority in their order of arrival
    preparing      where requests wait for adapters
    stored         where they wait for blocks from a store; None: there is no store
    num_requests   number of requests in the queue, in `preparing` and in `stored`
    num_tokens     number of their prompt tokens
    unprepared     (request, error) of requests whose adapter was refused, or whose blocks did not come; the loop ends
                   them
    ids            ids of these requests, and of those in `unprepared`
    """

    def __init__(self, preparing: Preparing, stored: StoredBlocks | None = None) -> None:
        self.preparing, self.stored = preparing, stored
        self.queue: deque[Admitted] = deque()
        self.ids: set[int] = set()
        self.num_requests = self.num_tokens = 0
        self.unprepared: list[tuple[Admitted, RequestError]] = []

    def add(self, admitted: Admitted) -> None:
        """Insert a request into the queue."""
        self._count(admitted)
        self._insert(admitted)

    def must_prepare(self, admitted: Admitted) -> bool:
        """Whether an accepted request with an adapter has to wait for it. If not, the request uses its adapter."""
        if admitted.request.adapter is None:
            self._count(admitted)
            self.preparing.add(admitted)
            return True
        self.preparing.store.use(admitted.request)
        return False

    def must_load(self, admitted: Admitted) -> bool:
        """Whether an accepted request has to wait for blocks from the store."""
        if self.stored is None or not self.stored.add(admitted):
            return False
        self._count(admitted)
        return True

    @property
    def num_unready(self) -> int:
        """Number of requests that wait for their adapters or blocks."""
        return len(self.preparing.waiting) + (0 if self.stored is None else len(self.stored))

    def take_prepared(self) -> None:
        """Queue the requests that have their adapters and blocks, and note those that are refused for them."""
        ready, refused = self.preparing.take_ready()
        for admitted in ready:
            if self.stored is None or not self.stored.add(admitted):
                self._insert(admitted)
        if self.stored is not None:
            loaded, failed = self.stored.take_ready()
            for admitted in loaded:
                self._insert(admitted)
            refused += failed
        for admitted, _ in refused:
            self._uncount(admitted)
            self.ids.add(admitted.request.request_id)    # it stays alive until the loop has ended the request
        self.unprepared += refused

    def take_unprepared(self) -> list[tuple[Admitted, RequestError]]:
        """Return the requests that were refused since the last call of this method, with the errors."""
        unprepared, self.unprepared = self.unprepared, []
        self.ids.difference_update(admitted.request.request_id for admitted, _ in unprepared)
        return unprepared

    def take(self, room: int | None) -> list[Admitted]:
        """Remove the first `room` requests from the queue and return them; None: all."""
        count = len(self.queue) if room is None else min(max(room, 0), len(self.queue))
        taken = [self.queue.popleft() for _ in range(count)]
        for admitted in taken:
            self._uncount(admitted)
        return taken

    def withdraw(self, request_ids: Set[int]) -> list[Admitted]:
        """Remove the requests with `request_ids` and return them. Other ids, and those of `unprepared`, are ignored."""
        wanted = request_ids & self.ids
        if not wanted:
            return []
        taken = [admitted for admitted in self.queue if admitted.request.request_id in wanted]
        self.queue = deque([admitted for admitted in self.queue if admitted.request.request_id not in wanted])
        taken += self.preparing.withdraw(wanted)
        if self.stored is not None:
            taken += self.stored.withdraw(wanted)
        for admitted in taken:
            self._uncount(admitted)
        return taken

    def clear(self) -> None:
        """Forget all requests, also as users of adapters."""
        self.queue.clear()
        self.ids.clear()
        self.num_requests = self.num_tokens = 0
        self.unprepared.clear()
        self.preparing.clear()
        if self.stored is not None:
            self.stored.clear()

    def _count(self, admitted: Admitted) -> None:
        self.ids.add(admitted.request.request_id)
        self.num_requests += 1
        self.num_tokens += admitted.request.prompt_len

    def _uncount(self, admitted: Admitted) -> None:
        self.ids.discard(admitted.request.request_id)
        self.num_requests -= 1
        self.num_tokens -= admitted.request.prompt_len

    def _insert(self, admitted: Admitted) -> None:
        queue, index = self.queue, len(self.queue)
        while index and queue[index - 1].request.priority < admitted.request.priority:
            index -= 1
        queue.insert(index, admitted)
