"""Options that all requests of a benchmark share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...requests.inference_request import InferenceRequest


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of all requests of a benchmark.

    Without a temperature, decoding is greedy. Without an end id, every output has exactly the requested length.

    end_id, pad_id      values of these request tensors; -1: not set
    beam_width          beams per request
    context_logits, generation_logits   whether responses include these logits
    temperature         temperature at which tokens are sampled from the whole vocabulary; None: greedy
    timings             whether responses include performance metrics, which are needed for queue times
    cache_salt          salt of the requests, which reuse cached blocks only of requests with the same salt; None: no
                        salt. Repetitions of a workload have different salts
    adapters            task ids of adapters, which the requests have in turn; empty: none
    """

    end_id: int = -1
    pad_id: int = -1
    beam_width: int = 1
    context_logits: bool = False
    generation_logits: bool = False
    temperature: float | None = None
    timings: bool = False
    cache_salt: str | None = None
    adapters: Sequence[int] = ()

    def make(self, request: dict[str, Any], *, streaming: bool, arrival_time: float | None = None) -> InferenceRequest:
        """Return an InferenceRequest for a request of a workload.

        request        a request in the form of a workload
        arrival_time   value of time.monotonic() at the arrival; None: the time of admission
        """
        tensors = {"input_ids": request["prompt"], "request_output_len": request["max_tokens"], "end_id": self.end_id}
        if self.pad_id != -1:
            tensors["pad_id"] = self.pad_id
        if self.beam_width != 1:
            tensors["beam_width"] = self.beam_width
        if self.context_logits:
            tensors["return_context_logits"] = True
        if self.generation_logits:
            tensors["return_generation_logits"] = True
        if self.temperature is not None:
            tensors["temperature"] = self.temperature
        if self.timings:
            tensors["return_perf_metrics"] = True
        if self.adapters:
            tensors["lora_task_id"] = self.adapters[request["id"] % len(self.adapters)]
        salt = self.cache_salt
        if salt is not None and request.get("repetition"):
            salt = f"{salt}, repetition {request['repetition']}"
        return InferenceRequest(request["id"], tensors, is_streaming=streaming, cache_salt=salt,
                                arrival_time=arrival_time)
