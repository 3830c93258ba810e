"""Mistakes that a type checker finds. A line with `expected` has an error with the given code.

Other lines have none.
"""

from collections.abc import Collection

from batch_manager import (  # expected: attr-defined
    GptManager,
    GptManagr,
    InferenceRequest,
    LlmRequest,
    NamedTensor,
    Parts,
    RequestScheduler,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.aio import AsyncEngine


class ClockWithoutTimestamp:
    def monotonic(self) -> float:
        return 0.0


class ForgetsWhatIsInFlight(RequestScheduler):
    def schedule_request(self, active_requests: list[LlmRequest]) -> None:  # expected: override
        return None


class ForgetsToAnswer(RequestScheduler):
    def schedule_request(self, active_requests: list[LlmRequest],  # expected: override
                         inflight_request_ids: Collection[int]) -> list[LlmRequest]:
        return active_requests


def get(max_num_requests: int) -> list[str]:
    return ["a prompt"] * max_num_requests


def send(request_id: int, tensors: list[NamedTensor], final_response: bool) -> None:
    print(request_id, tensors, final_response, GptManagr)


def serve() -> None:
    GptManager(
        "model", TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
        get,  # expected: arg-type
        send,  # expected: arg-type
        parts=Parts(clock=ClockWithoutTimestamp()),  # expected: arg-type
        optional_params=TrtGptModelOptionalParams(max_batch_sise=4))  # expected: call-arg


def ask() -> None:
    request = InferenceRequest(1, priorty=0.5)  # expected: call-arg
    print(request.runtime_topk)  # expected: attr-defined
    request_id: str = request.request_id  # expected: assignment
    print(request_id)


async def forgets_to_wait() -> None:
    engine = AsyncEngine.start("model")
    print(engine.info)  # expected: attr-defined
