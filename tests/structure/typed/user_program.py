"""A user's program that passes mypy --strict. tests/structure/test_types.py checks it; it is never run."""

import asyncio
import queue
import time
from collections.abc import Collection, Iterable

from batch_manager import (
    CapacityScheduler,
    ErrorCode,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    KvCacheManager,
    Limits,
    LlmRequest,
    MicroBatchScheduler,
    NamedTensor,
    Parts,
    RequestScheduler,
    SchedulerOutput,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.aio import AsyncEngine, Delta, RequestFailed
from batch_manager.extras.llm import LLM
from batch_manager.testing import ScriptedBackend


class ManualClock:
    """A class that is a Clock by its methods, without a base class."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def timestamp(self) -> str:
        return time.strftime("%m-%d-%Y %H:%M:%S")


class OldestFirst:
    """A class that is a scheduler by its method, without a base class."""

    def schedule_request(self, active_requests: list[LlmRequest],
                         inflight_request_ids: Collection[int]) -> SchedulerOutput:
        ready = [request for request in active_requests if request.request_id not in inflight_request_ids]
        return SchedulerOutput(context_requests=[request for request in ready if request.is_context][:1],
                               generation_requests=[request for request in ready if request.is_generating])


class Everything(RequestScheduler):
    def __init__(self, limits: Limits, kv_cache_manager: KvCacheManager) -> None:
        self.most, self.kv = limits.max_batch_size, kv_cache_manager

    def schedule_request(self, active_requests: list[LlmRequest],
                         inflight_request_ids: Collection[int]) -> SchedulerOutput:
        assert self.kv.free_blocks >= 0
        return SchedulerOutput(active_requests[:self.most], [], [], chunk_sizes=[8] * len(active_requests[:self.most]))


class ShortestFirst(CapacityScheduler):
    def schedule_request(self, active_requests: list[LlmRequest]) -> tuple[list[LlmRequest], list[LlmRequest]]:
        return sorted(active_requests, key=lambda request: request.prompt_len), []


class TwoAtATime(MicroBatchScheduler):
    def schedule(self, fitting_requests: list[LlmRequest],
                 inflight_request_ids: Collection[int]) -> tuple[list[LlmRequest], list[LlmRequest]]:
        return fitting_requests[:2], []


class Server:
    def __init__(self) -> None:
        self.waiting: queue.Queue[InferenceRequest] = queue.Queue()
        self.stopped: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.records: list[str] = []

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        return [self.waiting.get() for _ in range(min(max_num_requests, self.waiting.qsize()))]

    def send_response(self, request_id: int, tensors: list[NamedTensor], final_response: bool, error: str) -> None:
        if error:
            code, message = ErrorCode.of(error)
            print(code.is_retryable, message)
            return
        for tensor in tensors:
            if tensor.name == "output_ids":
                self.tokens.setdefault(request_id, []).extend(tensor.array[0, 0].tolist())

    def poll_stop_signal(self) -> set[int]:
        return self.stopped

    def return_stats(self, json: str) -> None:
        self.records.append(json)

    def submit(self, request_id: int, input_ids: list[int]) -> InferenceRequest:
        request = InferenceRequest(request_id, {"input_ids": input_ids, "request_output_len": 8}, is_streaming=True,
                                   priority=0.7, deadline_s=30.0, cache_salt="user 1")
        request.temperature = 0.7
        request.runtime_top_k = 40
        assert request.max_new_tokens == 8
        self.waiting.put(request)
        return request


def serve(server: Server) -> bool:
    params = TrtGptModelOptionalParams(max_batch_size=16, kv_cache_config=KvCacheConfig(max_tokens=4096))
    parts = Parts(scheduler=Everything, clock=ManualClock(), trace=lambda iteration: print(iteration.generation),
                  at_end=lambda health: print(health["state"]))
    with GptManager("model", TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                    server.get_inference_requests, server.send_response, server.poll_stop_signal,
                    server.return_stats, params, terminate_req_id=1000, parts=parts) as manager:
        manager.notify()
        vocab_size: int = manager.info.vocab_size
        active: int = manager.num_active_requests
        print(vocab_size, active, manager.health()["state"])
        return manager.shutdown(drain=True, timeout=5.0)


def serve_without_a_model(server: Server) -> None:
    for parts in (Parts(backend=ScriptedBackend(), scheduler=OldestFirst()),
                  Parts(backend=ScriptedBackend, scheduler=ShortestFirst()), Parts(scheduler=TwoAtATime)):
        manager = GptManager(None, TrtGptModelType.V1, 1, SchedulerPolicy.GUARANTEED_NO_EVICT,
                             server.get_inference_requests, server.send_response, parts=parts)
        manager.wait_until_terminate(1.0)


async def tell(input_ids: list[int]) -> list[int]:
    tokens: list[int] = []
    async with await AsyncEngine.start("model", takes_all=True) as engine:
        try:
            async for delta in engine.stream({"input_ids": input_ids, "request_output_len": 64}, deadline_s=3.0):
                tokens += delta.tokens
        except RequestFailed as failed:
            print(failed.code.http_status, failed.message, failed.tokens)
        whole: Delta = await engine.generate({"input_ids": input_ids})
        print(whole.finish_reason.name)
    return tokens


def write(prompts: Iterable[str]) -> list[str]:
    with LLM("model", max_batch_size=4) as llm:
        for piece in llm.stream("Emma smiled, and", max_tokens=4):
            print(piece, end="")
        return [completion.text for completion in llm.generate(prompts, temperature=0, max_tokens=48)]


def main() -> None:
    server = Server()
    server_id: int = server.submit(1, [1, 2, 3]).request_id
    print(server_id, serve(server), asyncio.run(tell([1, 2, 3])), write(["It is a truth universally acknowledged"]))
    serve_without_a_model(server)
