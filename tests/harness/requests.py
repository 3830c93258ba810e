"""Requests of the tests."""

from typing import Any

from batch_manager import InferenceRequest

# arguments of a request that are not tensors
OPTIONS = ("priority", "deadline_s", "cache_salt", "arrival_time", "request_type")


def request(request_id: int, prompt: list[int], new_tokens: int, *, streaming: bool = False,
            **tensors: Any) -> InferenceRequest:
    """Return a request. `tensors` may be any request tensors, and the arguments of InferenceRequest in OPTIONS."""
    options = {name: tensors.pop(name) for name in OPTIONS if name in tensors}
    return InferenceRequest(request_id, {"input_ids": prompt, "request_output_len": new_tokens, **tensors},
                            is_streaming=streaming, **options)
