"""The accounting of adapters on the device and of the pages that they take.

The key of an adapter is its task id. Requests without a task id take no pages.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator

from ..errors import OutOfResourceError
from ..handover import AdapterLoad
from ..requests.llm_request import LlmRequest


class PeftCacheManager:
    """Tracks which adapters are on the device, in a fixed number of pages.

    An adapter stays on the device while a request uses it, and afterwards until other adapters need its pages.

    pages_of   function (task id) -> number of pages of the adapter
    """

    def __init__(self, max_device_pages: int, pages_of: Callable[[int], int]) -> None:
        self.max_device_pages = max_device_pages
        self.pages_of = pages_of
        self._free = list(range(max_device_pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._users: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()         # least recently used first
        self._holders: dict[LlmRequest, int] = {}
        self._num_loads = self._num_evictions = 0

    @property
    def free_pages(self) -> int:
        """Number of pages that are empty or have an idle adapter."""
        return len(self._free) + sum(len(self._pages[task_id]) for task_id in self._idle)

    def start_scheduling(self) -> "PageLedger":
        """Return the budget of pages for one scheduling pass."""
        return PageLedger(self)

    def pages(self, request: LlmRequest) -> list[int]:
        """The ids of the pages of the adapter that the request holds; empty if it holds no adapter."""
        task_id = self._holders.get(request)
        return [] if task_id is None else self._pages[task_id]

    def claim(self, requests: Iterable[LlmRequest]) -> list[AdapterLoad]:
        """Claim the adapters of these requests, except adapters that they hold already.

        Returns the loads of the adapters that are not on the device.

        Raises OutOfResourceError, with nothing changed, if the adapters do not fit.
        """
        new = [(request, request.lora_task_id) for request in requests
               if request.lora_task_id is not None and request not in self._holders]
        wanted = {task_id for _, task_id in new if not self._users[task_id]}
        needed = sum(self.pages_of(task_id) for task_id in wanted)
        if needed > self.free_pages:
            raise OutOfResourceError(f"{needed} adapter pages are needed and {self.free_pages} are free")

        for task_id in wanted:
            self._idle.pop(task_id, None)
        loads = []
        for request, task_id in new:
            if task_id not in self._pages:
                loads.append(AdapterLoad(task_id, tuple(self._load(task_id))))
            self._users[task_id] += 1
            self._holders[request] = task_id
        return loads

    def release(self, request: LlmRequest) -> None:
        """Release the adapter of the request, if it holds one."""
        task_id = self._holders.pop(request, None)
        if task_id is not None:
            self._users[task_id] -= 1
            if not self._users[task_id]:
                del self._users[task_id]
                self._idle[task_id] = None

    def figures(self) -> dict[str, int]:
        """Return name -> value of the adapter statistics. Loads and evictions count from construction."""
        free = self.free_pages
        return {"LoRA Device Pages": self.max_device_pages, "Free LoRA Device Pages": free,
                "Used LoRA Device Pages": self.max_device_pages - free, "LoRA Adapters On Device": len(self._pages),
                "LoRA Loads": self._num_loads, "LoRA Evictions": self._num_evictions}

    def _load(self, task_id: int) -> list[int]:
        count = self.pages_of(task_id)
        while len(self._free) < count:
            oldest, _ = self._idle.popitem(last=False)
            self._free += reversed(self._pages.pop(oldest))
            self._num_evictions += 1
        self._pages[task_id] = [self._free.pop() for _ in range(count)]
        self._num_loads += 1
        return self._pages[task_id]

    def faults(self) -> Iterator[str]:
        """Describe the inconsistencies of the accounting."""
        owned = [page_id for pages in self._pages.values() for page_id in pages]
        if sorted([*owned, *self._free]) != list(range(self.max_device_pages)):
            yield "an adapter page is neither free nor taken, or both"
        if Counter(self._holders.values()) != self._users:
            yield "the user counts of the adapters are wrong"
        if set(self._pages) != set(self._users) | set(self._idle) or set(self._users) & set(self._idle):
            yield "an adapter is neither in use nor idle, or both"


class PageLedger:
    """The number of pages that a plan may still spend. An adapter counts once, however many requests use it."""

    __slots__ = ("available_pages", "_manager", "_counted")

    def __init__(self, manager: PeftCacheManager) -> None:
        self._manager = manager
        self._counted: set[int] = set()
        self.available_pages = manager.max_device_pages

    def needed(self, requests: Iterable[LlmRequest]) -> int:
        """Number of pages of the adapters of `requests`, except adapters for which the plan has already spent pages."""
        new = {request.lora_task_id for request in requests if request.lora_task_id is not None} - self._counted
        return sum(map(self._manager.pages_of, new))

    def fits(self, *requests: LlmRequest) -> bool:
        return self.needed(requests) <= self.available_pages

    def spend(self, *requests: LlmRequest) -> None:
        self.available_pages -= self.needed(requests)
        self._counted.update(request.lora_task_id for request in requests if request.lora_task_id is not None)
