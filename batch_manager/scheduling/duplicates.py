"""Delays contexts while another request computes a block that they can share."""

from ..kv.kv_cache_manager import KvCacheManager
from ..requests.llm_request import LlmRequest
from .interfaces import RequestList


class DuplicateDelay:
    """Finds contexts to delay in one scheduling pass.

    The key of a context is its prompt up to and including the first full block that is not cached. The first context
    with a key computes the block. Other contexts with this key are held back until the step that computes the block is
    read and the block is cached. No context waits for a block that will not become reusable.

    requests   all requests that may be computing a block, including requests that cannot run in this pass
    """

    def __init__(self, kv_cache_manager: KvCacheManager, requests: RequestList) -> None:
        self._owns = kv_cache_manager.owns
        self._cache = kv_cache_manager.cache if kv_cache_manager.enable_block_reuse else None
        self._computed_by: dict[bytes, LlmRequest] = {}
        if self._cache is not None:
            for request in requests:
                if request.context_read < request.prompt_len and self._owns(request):
                    self._is_computed_by_another(request)

    def holds_back(self, request: LlmRequest) -> bool:
        """Whether `request` is a context that holds no blocks and must wait.

        The request must wait while another context computes the next block of the request. If no other context
        computes this block, and the block will become reusable, `request` is recorded as the context that computes it.
        """
        return (self._cache is not None and request.is_context and self._is_computed_by_another(request)
                and not self._owns(request))

    def _is_computed_by_another(self, request: LlmRequest) -> bool:
        cache = self._cache
        key = None if cache is None else cache.first_new_key(request)
        if cache is None or key is None:
            return False
        if key not in self._computed_by and cache.will_publish_more(request):
            self._computed_by[key] = request
        return self._computed_by.get(key, request) is not request
