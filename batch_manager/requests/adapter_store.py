"""The LoRA adapters that the engine knows, in host memory."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..adapter_values import AdapterContent
from ..errors import AdapterNotCachedError, InvalidRequestError, QueueFullError, RequestTooLargeError, counted
from .llm_request import LlmRequest

_MORE_ON_DEVICE = "raise PeftCacheConfig.device_cache_percent, or num_device_module_layer if it is set"
_MORE_ON_HOST = "raise PeftCacheConfig.host_cache_size, or num_host_module_layer if it is set"


@dataclass(slots=True, eq=False)
class _Stored:
    """A content, the task ids that name it, and the number of living requests that use it."""

    content: AdapterContent
    task_ids: set[int] = field(default_factory=set)
    num_users: int = 0


class AdapterStore:
    """Keeps adapters by task id, in a limited number of bytes. Equal contents are kept once, whatever their ids.

    An adapter that a living request uses stays. So does one that was put to be kept, until its id is forgotten. Others
    are evicted when others need their bytes, least recently used first. One thread uses the store.

    max_bytes    bytes for all contents
    max_pages    pages of the device for adapters: a larger adapter can never run
    largest_bytes   bytes of the largest content that a step can bring to other ranks; None: there are none
    used_bytes   bytes of the contents now
    users        request id -> request, of the living requests with an adapter
    """

    def __init__(self, max_bytes: int, max_pages: int, largest_bytes: int | None = None) -> None:
        self.max_bytes, self.max_pages, self.largest_bytes = max_bytes, max_pages, largest_bytes
        self.used_bytes = 0
        self.users: dict[int, LlmRequest] = {}
        self._stored: dict[bytes, _Stored] = {}
        self._of_task: dict[int, _Stored] = {}
        self._kept: set[int] = set()                                   # task ids
        self._idle: OrderedDict[bytes, None] = OrderedDict()           # contents that may be evicted, oldest use first

    def __len__(self) -> int:
        """The number of contents."""
        return len(self._stored)

    def find(self, task_id: int) -> AdapterContent:
        """Return the content that the task id names. Raises AdapterNotCachedError."""
        stored = self._of_task.get(task_id)
        if stored is None:
            raise AdapterNotCachedError(f"LoRA task {task_id} not found in cache",
                                        "a request with lora_task_id alone needs an adapter that the engine knows",
                                        "send lora_weights and lora_config with the request")
        return stored.content

    def put(self, task_id: int, content: AdapterContent, *, keep: bool = False) -> AdapterContent:
        """Store a content under a task id, and return the stored content, which may be an equal one stored before.

        keep   keep it until the id is forgotten

        Raises InvalidRequestError if the id names another content, RequestTooLargeError if the content can never fit,
        and QueueFullError if it does not fit now.
        """
        stored = self._of_task.get(task_id)
        if stored is None:
            stored = self._stored.get(content.digest) or self._add(content)
            stored.task_ids.add(task_id)
            self._of_task[task_id] = stored
        elif stored.content.digest != content.digest:
            raise InvalidRequestError(f"LoRA task {task_id} is in the cache with other content than this one",
                                      "an id names one adapter for as long as it is cached",
                                      "use another lora_task_id, or forget the adapter first")
        if keep:
            self._kept.add(task_id)
        self._settle(stored)
        return stored.content

    def forget(self, task_id: int) -> bool:
        """Free a task id. Its content goes with the last living request that uses it. Returns whether it was known."""
        stored = self._of_task.pop(task_id, None)
        if stored is None:
            return False
        stored.task_ids.discard(task_id)
        self._kept.discard(task_id)
        self._settle(stored)
        return True

    def use(self, request: LlmRequest) -> None:
        """Count a request, whose `adapter` is stored, as a user of its adapter."""
        assert request.adapter is not None
        stored = self._stored[request.adapter.digest]
        self.users[request.request_id] = request
        stored.num_users += 1
        self._settle(stored)

    def leave(self, request_id: int) -> None:
        """Count a request no longer. Does nothing for a request without an adapter."""
        request = self.users.pop(request_id, None)
        if request is not None:
            assert request.adapter is not None
            stored = self._stored[request.adapter.digest]
            stored.num_users -= 1
            self._settle(stored)

    def leave_all(self) -> None:
        """Count no request any more."""
        for request_id in list(self.users):
            self.leave(request_id)

    def figures(self) -> dict[str, int]:
        """Return the statistics of the store."""
        return {"LoRA Adapters On Host": len(self._stored), "LoRA Host Cache Bytes": self.max_bytes,
                "Used LoRA Host Cache Bytes": self.used_bytes, "Requests With LoRA": len(self.users)}

    def _add(self, content: AdapterContent) -> _Stored:
        size = counted(content.num_bytes, "byte")
        if content.num_pages > self.max_pages:
            raise RequestTooLargeError(f"the adapter has rank {content.num_pages}",
                                       f"the device has {counted(self.max_pages, 'page')} for adapters, one for a rank",
                                       f"{_MORE_ON_DEVICE}, or use a smaller adapter")
        if content.num_bytes > self.max_bytes:
            raise RequestTooLargeError(f"the adapter has {size}", f"the host cache has {self.max_bytes:,}",
                                       f"{_MORE_ON_HOST}, or use a smaller adapter")
        if self.largest_bytes is not None and content.num_bytes > self.largest_bytes:
            raise RequestTooLargeError(f"the adapter has {size}", "a step brings the other ranks adapters of at most "
                                       f"{self.largest_bytes:,}", "use a smaller adapter, or bfloat16")
        idle = sum(self._stored[digest].content.num_bytes for digest in self._idle)
        if self.used_bytes - idle + content.num_bytes > self.max_bytes:
            raise QueueFullError(f"the adapter has {size}, and adapters in use or kept have "
                                 f"{self.used_bytes - idle:,} of {self.max_bytes:,}",
                                 "the adapters of living requests stay in the host cache",
                                 f"try again later, or {_MORE_ON_HOST}")
        while self.used_bytes + content.num_bytes > self.max_bytes:
            oldest, _ = self._idle.popitem(last=False)
            for task_id in self._stored[oldest].task_ids:
                del self._of_task[task_id]
            self._drop(oldest)
        stored = self._stored[content.digest] = _Stored(content)
        self.used_bytes += content.num_bytes
        return stored

    def _settle(self, stored: _Stored) -> None:
        """Decide anew whether a content may be evicted, or is dropped, after a change or a use."""
        digest = stored.content.digest
        self._idle.pop(digest, None)
        if not stored.num_users and not stored.task_ids:
            self._drop(digest)
        elif not stored.num_users and self._kept.isdisjoint(stored.task_ids):
            self._idle[digest] = None

    def _drop(self, digest: bytes) -> None:
        self.used_bytes -= self._stored.pop(digest).content.num_bytes

    def faults(self) -> Iterator[str]:
        """Describe the inconsistencies of the store."""
        if self.used_bytes != sum(stored.content.num_bytes for stored in self._stored.values()):
            yield "the bytes of the adapters in the store are wrong"
        if self.used_bytes > self.max_bytes:
            yield "the store has more bytes than it may"
        named = {task_id: digest for digest, stored in self._stored.items() for task_id in stored.task_ids}
        if named != {task_id: stored.content.digest for task_id, stored in self._of_task.items()}:
            yield "the task ids of the store name other contents"
        if not self._kept <= named.keys():
            yield "a kept adapter is gone"
        for digest, stored in self._stored.items():
            users = sum(request.adapter is stored.content for request in self.users.values())
            if users != stored.num_users:
                yield "the user counts of the store are wrong"
            may_go = not users and self._kept.isdisjoint(stored.task_ids)
            if (digest in self._idle) != may_go or not users and not stored.task_ids:
                yield "an adapter of the store is kept and may be evicted, or neither"
