"""Contexts that wait one step because somebody is computing what they could share."""

from ..kv.kv_cache_manager import KvCacheManager
from ..requests.llm_request import LlmRequest
from .interfaces import RequestList


class DuplicateDelay:
    """For one scheduling pass. A context is known by its prompt up to the first full block that is not cached: who
    comes second with the same one is held back until it is.
    """

    def __init__(self, kv_cache_manager: KvCacheManager, requests: RequestList) -> None:
        self._owns = kv_cache_manager.owns
        self._cache = kv_cache_manager.cache if kv_cache_manager.enable_block_reuse else None
        self._computed_by: dict[bytes, LlmRequest] = {}
        if self._cache is not None:
            for request in requests:
                if request.is_context and self._owns(request):
                    self.holds_back(request)

    def holds_back(self, request: LlmRequest) -> bool:
        """Whether another context is computing this one's next block. If nobody is, this one is from now on."""
        if self._cache is None or not request.is_context:
            return False
        key = self._cache.first_new_key(request)
        if key is None:
            return False
        return self._computed_by.setdefault(key, request) is not request and not self._owns(request)
