"""Times of requests: arrival, start and tokens, for statistics and for `return_perf_metrics`."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ..handover import ScheduledBatch
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..responses.perf_metrics import NANOSECONDS, PerfMetrics
from ..seams import Clock
from ..steps.resources import Resources

MICROSECONDS = 10**6


class Timings:
    """Arrival times of requests that have not started, and the metrics of requests with `return_perf_metrics`.

    asking           request id -> metrics so far, of requests with `return_perf_metrics`
    waiting          request id -> arrival in seconds of the clock, of accepted requests that were in no step yet
    recomputed_tokens   number of context tokens computed again after a pause; tokens in reused blocks do not count
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.asking: dict[int, PerfMetrics] = {}
        self.waiting: OrderedDict[int, float] = OrderedDict()
        self.recomputed_tokens = self._lookup_tokens = self._hit_tokens = self._started = 0
        self._queue_s = self._longest_queue_s = 0.0

    def accept(self, admitted: Admitted, arrived_at: float) -> None:
        request_id = admitted.request.request_id
        self.waiting[request_id] = arrived_at
        if admitted.response.return_perf_metrics:
            self.asking[request_id] = PerfMetrics(arrival_time_ns=_ns(arrived_at))

    def note_contexts(self, batch: ScheduledBatch, contexts: Sequence[LlmRequest], kv: KvCacheManager) -> None:
        """Note the starts of requests, and the tokens that paused requests compute again.

        contexts   the context requests of `batch`, which is about to be launched
        """
        waiting = self.waiting
        now = None
        for work, request in zip(batch.context, contexts):
            if request.num_pauses:
                again = request.num_recomputed(work.start, work.end - work.start)
                self.recomputed_tokens += again
                metrics = self.asking.get(request.request_id)
                if metrics is not None:
                    self.asking[request.request_id] = replace(
                        metrics, recomputed_tokens=metrics.recomputed_tokens + again)
            if work.setup is None or request.request_id not in waiting:    # a later chunk, or a start after a pause
                continue
            request_id, now = request.request_id, self._clock.monotonic() if now is None else now
            queue_s = max(now - waiting.pop(request_id), 0.0)
            self._started += 1
            if kv.enable_block_reuse:
                self._lookup_tokens += request.prompt_len
                self._hit_tokens += kv.reused_tokens(request)
            self._queue_s += queue_s
            self._longest_queue_s = max(self._longest_queue_s, queue_s)
            if request_id in self.asking:
                self.asking[request_id] = replace(self.asking[request_id], first_scheduled_time_ns=_ns(now),
                                                  cached_tokens=kv.reused_tokens(request))

    def figures(self) -> dict[str, int]:
        """Return the statistics of starts and waits; those of one iteration count from the previous call.

        Started requests are those in a step for the first time; a start after a pause does not count. Tokens are
        looked up at the first start, with block reuse.
        """
        oldest = next(iter(self.waiting.values()), None)
        oldest_wait_s = 0.0 if oldest is None else max(self._clock.monotonic() - oldest, 0.0)
        figures = {
            "Cache Lookup Tokens": self._lookup_tokens,
            "Cache Hit Tokens": self._hit_tokens,
            "Recomputed Tokens": self.recomputed_tokens,
            "Oldest Wait Microseconds": round(oldest_wait_s * MICROSECONDS),
            "Started Requests": self._started,
            "Queue Time Microseconds": round(self._queue_s * MICROSECONDS),
            "Longest Queue Time Microseconds": round(self._longest_queue_s * MICROSECONDS),
        }
        self._started, self._queue_s, self._longest_queue_s = 0, 0.0, 0.0
        return figures

    def note_tokens(self, requests: Iterable[LlmRequest], void: Collection[LlmRequest]) -> None:
        """Record the time for each request with `return_perf_metrics` that got a token in the step just read.

        A call is needed only while a live request has `return_perf_metrics`.

        requests   requests of the step that are still active
        void       requests with void rows, which got no token
        """
        now = _ns(self._clock.monotonic())
        for request in requests:
            metrics = self.asking.get(request.request_id)
            # A request whose whole context is computed got a token.
            if metrics is not None and request.context_read == request.prompt_len and request not in void:
                self.asking[request.request_id] = replace(
                    metrics, first_token_time_ns=metrics.first_token_time_ns or now, last_token_time_ns=now)

    def note_pauses(self, paused: Sequence[LlmRequest], kv: KvCacheManager) -> None:
        """Note a pause of the requests in `paused`, before they release their blocks.

        A call is needed only while a live request has `return_perf_metrics`.
        """
        for request in paused:
            metrics = self.asking.get(request.request_id)
            if metrics is not None:
                self.asking[request.request_id] = replace(_with_blocks(metrics, *kv.blocks_since_start(request)),
                                                          num_pauses=metrics.num_pauses + 1)

    def take(self, request: LlmRequest, resources: Resources) -> PerfMetrics | None:
        """Return the metrics of a request at its end, before it releases its blocks.

        Returns None for a request without `return_perf_metrics`.
        """
        metrics = self.asking.pop(request.request_id, None) if self.asking else None
        return None if metrics is None else _with_blocks(metrics, *resources.blocks_since_start(request))

    def forget(self, request_id: int) -> None:
        """Forget an ended request."""
        self.waiting.pop(request_id, None)
        self.asking.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        self.asking.clear()


def _with_blocks(metrics: PerfMetrics, new: int, reused: int) -> PerfMetrics:
    return replace(metrics, kv_cache_alloc_new_blocks=metrics.kv_cache_alloc_new_blocks + new,
                   kv_cache_reused_blocks=metrics.kv_cache_reused_blocks + reused)


def _ns(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
