"""The scheduler of static batches (TrtGptModelType.V1)."""

from ..kv.kv_cache_manager import KvCacheManager
from .capacity import StaticBatchScheduler
from .interfaces import RequestList


class LockstepScheduler(StaticBatchScheduler):
    """Forms static batches of requests with the same `batch_key`.

    The first waiting request forms the next batch, together with later requests of the same key. Other requests keep
    their order. The sum of the longest prompt and the longest output of a batch is at most max_seq_len, so that one
    request's long prompt does not cut another request's output.

    Never pauses a request.
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager, max_seq_len: int) -> None:
        super().__init__(max_num_requests, kv_cache_manager)
        self.max_seq_len = max_seq_len

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        running = [request for request in active_requests if request.is_generating]
        return super().schedule_request(running or self._alike(active_requests))

    def _alike(self, active_requests: RequestList) -> RequestList:
        waiting = [request for request in active_requests if request.is_context]
        alike: RequestList = []
        prompt = output = 0
        for request in waiting:
            longest = max(prompt, request.prompt_len), max(output, request.max_new_tokens)
            if request.batch_key == waiting[0].batch_key and (not alike or sum(longest) <= self.max_seq_len):
                alike.append(request)
                prompt, output = longest
        return alike
