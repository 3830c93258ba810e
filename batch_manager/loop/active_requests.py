"""The active requests, in the order in which schedulers see them."""

from collections.abc import Iterator

from ..requests.llm_request import LlmRequest


class ActiveRequests:
    """The active requests. A request can be found by its id, and has a slot while it is active.

    The requests are ordered by priority, larger first, then by arrival. A paused request keeps its position. Freed
    slots are reused first, so the number of slots is the largest number of requests that were active at once.

    in_order   the requests in the order above; only this class changes the list
    """

    def __init__(self) -> None:
        self._by_id: dict[int, LlmRequest] = {}
        self.in_order: list[LlmRequest] = []
        self._num_slots = 0
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        return len(self.in_order)

    def __iter__(self) -> Iterator[LlmRequest]:
        return iter(self.in_order)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def get(self, request_id: int) -> LlmRequest | None:
        return self._by_id.get(request_id)

    def add(self, request: LlmRequest) -> None:
        """Insert a request after all requests of the same or a larger priority, and give it a slot."""
        assert request.request_id not in self._by_id
        index = len(self.in_order)
        while index and self.in_order[index - 1].priority < request.priority:
            index -= 1
        self.in_order.insert(index, request)
        self._by_id[request.request_id] = request
        if self._free_slots:
            request.seq_slot = self._free_slots.pop()
        else:
            request.seq_slot = self._num_slots
            self._num_slots += 1

    def remove(self, request: LlmRequest) -> None:
        """Remove a request and free its id and slot."""
        del self._by_id[request.request_id]
        self.in_order.remove(request)
        self._free_slots.append(request.seq_slot)

    def clear(self) -> None:
        """Remove all requests, even if an exception left this object inconsistent."""
        self._by_id.clear()
        self.in_order.clear()
        self._free_slots = list(range(self._num_slots))
