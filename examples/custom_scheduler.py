"""A custom scheduler: shortest job first, with a limit on how often a request is passed over.

    python examples/custom_scheduler.py

In each iteration, a capacity scheduler decides which requests may hold KV cache blocks. Like GUARANTEED_NO_EVICT, this
scheduler reserves all blocks that started requests may still need. It starts waiting requests in the order of their
work, so that short requests do not wait for long requests. A request that was passed over too often goes first, so that
long requests do not wait forever.

The example uses a scripted model, so that it runs at once. With a real model:
`GptManager(..., parts=Parts(scheduler=ShortestJobFirst))`.
"""

from collections import Counter

from batch_manager import (
    CapacityScheduler,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    Trace,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.testing import ScriptedBackend
from batch_manager.tools.draw.text import render_text

LAST = 1000    # a request with this id makes the worker finish the others and end


class ShortestJobFirst(CapacityScheduler):
    """Starts the requests that were passed over `patience` times, then the other requests, least work first."""

    def __init__(self, limits, kv_cache_manager, patience: int = 8) -> None:
        self.max_num_requests = limits.max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.patience = patience
        self.passed_over: Counter[int] = Counter()

    def schedule_request(self, active_requests):
        free = self.kv_cache_manager.free_blocks
        started = [request for request in active_requests if self.kv_cache_manager.owns(request)]
        fitting = started[: self.max_num_requests]
        for request in started:
            free -= self.kv_cache_manager.get_remaining_blocks_to_completion(request)

        waiting = [request for request in active_requests if not self.kv_cache_manager.owns(request)]
        for request in sorted(waiting, key=self._sort_key):
            need = self.kv_cache_manager.get_remaining_blocks_to_completion(request)
            if len(fitting) == self.max_num_requests or need > free:
                break
            fitting.append(request)
            free -= need

        entering = set(fitting)
        late = {request.request_id for request in waiting if request not in entering}
        self.passed_over = Counter({request_id: self.passed_over[request_id] + 1 for request_id in late})
        return fitting, []

    def _sort_key(self, request):
        """Return the sort key of a request; smaller keys start first.

        Requests with equal keys keep their order of arrival.
        """
        is_late = self.passed_over[request.request_id] >= self.patience
        return not is_late, 0 if is_late else request.remaining_context + request.max_new_tokens


def run(scheduler) -> tuple[str, float]:
    """Run the requests of the example with a scheduler.

    Returns (picture, mean end). The picture shows the run as text. The end of a request is the number of the
    iteration in which the request ended, and the mean is over all requests.
    """
    lengths = {1: 40, 2: 36, 3: 4, 4: 6, 5: 30, 6: 3, 7: 5, 8: 4}
    pending = [InferenceRequest(i, {"input_ids": [i] * 8, "request_output_len": n}) for i, n in lengths.items()]
    pending.append(InferenceRequest(LAST))
    trace = Trace()

    def get_inference_requests(max_num_requests):
        items = pending[:max_num_requests]
        del pending[:max_num_requests]
        return items

    def send_response(request_id, tensors, final_response, error_message):
        assert not error_message, error_message

    with GptManager(
        None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT,
        get_inference_requests, send_response,
        optional_params=TrtGptModelOptionalParams(max_batch_size=3, max_num_sequences=9,
                                                  kv_cache_config=KvCacheConfig(tokens_per_block=8)),
        terminate_req_id=LAST,
        parts=Parts(backend=ScriptedBackend(num_blocks=12, tokens_per_block=8), scheduler=scheduler,
                    trace=trace.append),
    ) as manager:
        manager.wait_until_terminate()
    ends = [iteration.iteration for iteration in trace.iterations for _ in iteration.finished]
    return render_text(trace.iterations), sum(ends) / len(ends)


if __name__ == "__main__":
    for name, scheduler in (("First come, first served", None), ("Shortest job first", ShortestJobFirst)):
        picture, mean_end = run(scheduler)
        print(f"{name}: a request ends in iteration {mean_end:.1f} on average\n\n{picture}\n")
