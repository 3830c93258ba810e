"""The requests being worked on, in the order schedulers see them."""

from collections.abc import Iterator

from ..requests.llm_request import LlmRequest


class ActiveRequests:
    """Active requests by id and in order, each with a slot.

    Order: by priority, larger first; inside one priority by arrival. A paused request keeps its position.
    Slots are the smallest free numbers, so that tables indexed by slot stay as small as the number of requests.

    in_order   the requests in that order; only this class changes it
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
        """Insert a request after all of at least its priority, and give it a slot."""
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
        """Remove a request. Its id and its slot are free at once."""
        del self._by_id[request.request_id]
        self.in_order.remove(request)
        self._free_slots.append(request.seq_slot)

    def clear(self) -> None:
        """Remove all requests, whatever state this object is in."""
        self._by_id.clear()
        self.in_order.clear()
        self._free_slots = list(range(self._num_slots))
