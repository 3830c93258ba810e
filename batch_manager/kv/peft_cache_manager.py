"""The accounting of adapters on the device and of the pages that they take.

The key of an adapter is the digest of its content. A page holds one rank. Requests without an adapter take no pages.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..adapter_values import AdapterContent
from ..errors import OutOfResourceError
from ..handover import AdapterLoad, SlotSetup
from ..requests.adapter_store import AdapterStore
from ..requests.llm_request import LlmRequest

LARGEST_LOADS_BYTES = 64 * 1024 * 1024    # of a plan with several loads, which the running requests wait for


class PeftCacheManager:
    """Tracks which adapters are on the device, in a fixed number of pages.

    An adapter stays on the device while a request uses it, and afterwards until other adapters need its pages.

    store   the adapters in host memory, for the statistics; None: there is none
    """

    def __init__(self, max_device_pages: int, store: AdapterStore | None = None) -> None:
        self.max_device_pages = max_device_pages
        self.store = store
        self._free = list(range(max_device_pages - 1, -1, -1))
        self._pages: dict[bytes, list[int]] = {}
        self._users: Counter[bytes] = Counter()
        self._idle: OrderedDict[bytes, None] = OrderedDict()       # least recently used first
        self._holders: dict[LlmRequest, bytes] = {}
        self._num_loads = self._num_evictions = 0

    @property
    def free_pages(self) -> int:
        """Number of pages that are empty or have an idle adapter."""
        return len(self._free) + sum(len(self._pages[digest]) for digest in self._idle)

    def start_scheduling(self) -> "PageLedger":
        """Return the budget of pages for one scheduling pass."""
        return PageLedger(self)

    def pages(self, request: LlmRequest) -> list[int]:
        """The ids of the pages of the adapter that the request holds; empty if it holds no adapter."""
        digest = self._holders.get(request)
        return [] if digest is None else self._pages[digest]

    def is_loaded(self, adapter: AdapterContent) -> bool:
        """Whether the adapter is on the device, in use or idle."""
        return adapter.digest in self._pages

    def pages_to_claim(self, requests: Iterable[LlmRequest], paused: Iterable[LlmRequest] = ()) -> tuple[int, int]:
        """Return the pages that a claim of `requests` takes, and the free pages, once the pauses have released theirs.
        """
        left = self._users.copy()
        left.subtract(self._holders[request] for request in paused if request in self._holders)
        new = _distinct(request for request in requests if request not in self._holders)
        released = sum(len(self._pages[digest]) for digest in self._users if not left[digest])
        return (sum(adapter.num_pages for digest, adapter in new.items() if left[digest] <= 0),
                self.free_pages + released)

    def claim(self, requests: Iterable[LlmRequest]) -> list[AdapterLoad]:
        """Claim the adapters of these requests, except adapters that they hold already.

        Returns the loads of the adapters that are not on the device.

        Raises OutOfResourceError, with nothing changed, if the adapters do not fit.
        """
        requests = [request for request in requests if request.adapter is not None and request not in self._holders]
        if not requests:
            return []
        needed, free = self.pages_to_claim(requests)
        if needed > free:
            raise OutOfResourceError(f"{needed} adapter pages are needed and {free} are free")

        for digest in _distinct(requests):
            self._idle.pop(digest, None)
        loads = []
        for request in requests:
            adapter, task_id = request.adapter, request.lora_task_id
            assert adapter is not None and task_id is not None
            if adapter.digest not in self._pages:
                loads.append(AdapterLoad(task_id, tuple(self._load(adapter)), adapter))
            self._users[adapter.digest] += 1
            self._holders[request] = adapter.digest
        return loads

    def set_up(self, request: LlmRequest, setup: SlotSetup) -> SlotSetup:
        """Return the setup with the pages of the adapter that the request holds."""
        return setup if request.adapter is None else replace(setup, adapter_pages=tuple(self.pages(request)))

    def release(self, request: LlmRequest) -> None:
        """Release the adapter of the request, if it holds one."""
        digest = self._holders.pop(request, None)
        if digest is not None:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._idle[digest] = None

    def figures(self) -> dict[str, int | str]:
        """Return name -> value of the adapter statistics. Loads and evictions count from construction."""
        free = self.free_pages
        figures: dict[str, int | str] = {
            "LoRA Device Pages": self.max_device_pages, "Free LoRA Device Pages": free,
            "Used LoRA Device Pages": self.max_device_pages - free, "LoRA Adapters On Device": len(self._pages),
            "LoRA Loads": self._num_loads, "LoRA Evictions": self._num_evictions}
        if self.store is not None:
            figures |= self.store.figures()
            figures["Running LoRA Tasks"] = _ids(self._holders)
            figures["Waiting LoRA Tasks"] = _ids(set(self.store.users.values()) - self._holders.keys())
        return figures

    def _load(self, adapter: AdapterContent) -> list[int]:
        while len(self._free) < adapter.num_pages:
            oldest, _ = self._idle.popitem(last=False)
            self._free += reversed(self._pages.pop(oldest))
            self._num_evictions += 1
        self._pages[adapter.digest] = [self._free.pop() for _ in range(adapter.num_pages)]
        self._num_loads += 1
        return self._pages[adapter.digest]

    def faults(self) -> Iterator[str]:
        """Describe the inconsistencies of the accounting."""
        owned = [page_id for pages in self._pages.values() for page_id in pages]
        if sorted([*owned, *self._free]) != list(range(self.max_device_pages)):
            yield "an adapter page is neither free nor taken, or both"
        if Counter(self._holders.values()) != self._users:
            yield "the user counts of the adapters are wrong"
        if set(self._pages) != set(self._users) | set(self._idle) or set(self._users) & set(self._idle):
            yield "an adapter is neither in use nor idle, or both"
        if self.store is not None:
            yield from self.store.faults()
            if not self._holders.keys() <= set(self.store.users.values()):
                yield "a request holds an adapter on the device and none in the store"


class PageLedger:
    """The number of pages that a plan may still spend. An adapter counts once, however many requests use it.

    A plan loads at most LARGEST_LOADS_BYTES, or one adapter.
    """

    __slots__ = ("available_pages", "_manager", "_counted", "_loaded_bytes")

    def __init__(self, manager: PeftCacheManager) -> None:
        self._manager = manager
        self._counted: set[bytes] = set()
        self._loaded_bytes = 0
        self.available_pages = manager.max_device_pages

    def needed(self, requests: Iterable[LlmRequest]) -> int:
        """Number of pages of the adapters of `requests`, except adapters for which the plan has already spent pages."""
        return sum(adapter.num_pages for adapter in self._new(requests))

    def fits(self, *requests: LlmRequest) -> bool:
        return self.needed(requests) <= self.available_pages

    def may_load(self, request: LlmRequest) -> bool:
        """Whether the adapter of the request is on the device, or the plan may load it beside its other loads."""
        num_bytes = self._bytes_to_load(self._new((request,)))
        return not num_bytes or not self._loaded_bytes or self._loaded_bytes + num_bytes <= LARGEST_LOADS_BYTES

    def spend(self, *requests: LlmRequest) -> None:
        new = self._new(requests)
        self.available_pages -= sum(adapter.num_pages for adapter in new)
        self._loaded_bytes += self._bytes_to_load(new)
        self._counted.update(adapter.digest for adapter in new)

    def _new(self, requests: Iterable[LlmRequest]) -> list[AdapterContent]:
        return [adapter for digest, adapter in _distinct(requests).items() if digest not in self._counted]

    def _bytes_to_load(self, adapters: Iterable[AdapterContent]) -> int:
        return sum(adapter.num_bytes for adapter in adapters if not self._manager.is_loaded(adapter))


def _distinct(requests: Iterable[LlmRequest]) -> dict[bytes, AdapterContent]:
    """Return digest -> content of the adapters of the requests, in their order."""
    return {request.adapter.digest: request.adapter for request in requests if request.adapter is not None}


def _ids(requests: Iterable[LlmRequest]) -> str:
    """Return the task ids of the requests, ascending and separated by commas."""
    return ",".join(map(str, sorted({request.lora_task_id for request in requests
                                     if request.lora_task_id is not None})))
