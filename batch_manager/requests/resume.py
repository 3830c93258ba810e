"""Makes a request that continues an interrupted one, on this or another engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidRequestError, counted, type_name
from ..names import RequestType
from ..sampling_config import shown, top_p_after
from .inference_request import TENSORS, InferenceRequest
from .tensor_values import Bound, few, read_tensor, scalar, words

_ANY_SIZE = Bound(2**63, "", 2**63)     # the engine checks sizes


def resume(request: InferenceRequest, tokens: Sequence[int] | np.ndarray) -> InferenceRequest:
    """Return a request that generates the tokens that `request` would have generated after `tokens`.

        requests.put(resume(request, tokens))         # the queue of another manager, in this process or another

    The output of a request depends only on the request, the weights and the seed. The output therefore continues
    identically on any engine with the same checkpoint: bitwise with `deterministic=True`, otherwise within the rounding
    of the dtype. In the new request, `request_output_len` and `min_length` count the tokens that are left,
    `prompt_ignore_length` does not cover `tokens`, and a decaying top-p starts at the value that it had reached.

    request   the original request; not changed
    tokens    all tokens of its responses, without an end id: a flat list, or an array that may have leading dimensions
              of 1. If `tokens` is empty, the result is a copy of the request without `arrival_time`

    The new request has the same id. Its streamed responses have the tokens after `tokens`. A response that is not
    streamed starts with the prompt and `tokens`, unless the engine has `exclude_input_in_output`. Log-probabilities,
    `cum_log_probs` and generation logits cover the tokens after `tokens`. `deadline_s` counts from the arrival of the
    new request, which computes its prompt and generates, whatever the type of `request`. A logits post-processor gets
    `tokens` as a part of the prompt; the caller must restore the state of the post-processor.

    Raises InvalidRequestError for a request that is complete: `tokens` has its full length, or ends with a stop word or
    with one of the request's end ids. Raises it for beams, context logits, draft tokens and a decaying top-p with a
    reset id, and for tokens that are not a row of integers.
    """
    if not isinstance(request, InferenceRequest):
        raise InvalidRequestError(f"request is of type {type_name(request)}", "expected an InferenceRequest")
    tensors = request.input_tensors
    tokens = _integers("tokens", tokens)
    if tokens:
        _resume(tensors, tokens)
        tensors.pop("context_phase_params", None)
    return InferenceRequest(
        request.request_id, tensors, is_streaming=request.is_streaming, priority=request.priority,
        logits_post_processor=request.logits_post_processor, deadline_s=request.deadline_s,
        cache_salt=request.cache_salt, kv_cache_retention_config=request.kv_cache_retention_config,
        request_type=RequestType.CONTEXT_AND_GENERATION if tokens else request.request_type,
        speculation=request.speculation)


def _resume(tensors: dict[str, Any], tokens: list[int]) -> None:
    """Change `tensors` of the original request, in place, to those of a request that continues after `tokens`."""
    for name, refused in (("beam_width", lambda value: value != 1), ("return_context_logits", bool)):
        if name in tensors and refused(value := _scalar(tensors, name)):
            raise _cannot(f"{name} is {shown(value)}")
    for name in ("draft_input_ids", "draft_logits"):
        if name in tensors:
            raise _cannot(f"{name} is set")
    for name in ("input_ids", "request_output_len"):
        if name not in tensors:
            raise _cannot(f"{name} is missing")
    prompt, num_tokens = _integers("input_ids", tensors["input_ids"]), len(tokens)
    num_left = _scalar(tensors, "request_output_len") - num_tokens
    if num_left < 1:
        raise _cannot(f"request_output_len is {num_left + num_tokens} and the responses have "
                      f"{counted(num_tokens, 'token')} already", is_complete=True)
    if "end_id" in tensors and tokens[-1] in few(TENSORS["end_id"], tensors["end_id"]):
        raise _cannot(f"tokens has {counted(num_tokens, 'token')} and ends with an end id", is_complete=True)
    if "stop_words_list" in tensors and _ends_with_one_of(
            words(read_tensor(TENSORS["stop_words_list"], tensors["stop_words_list"], _ANY_SIZE), 2**31),
            prompt + tokens):
        raise _cannot(f"tokens has {counted(num_tokens, 'token')} and ends with a stop word", is_complete=True)
    tensors.update(input_ids=prompt + tokens, request_output_len=num_left)
    tensors.pop("input_lengths", None)
    if "input_token_extra_ids" in tensors:
        tensors["input_token_extra_ids"] = _integers(
            "input_token_extra_ids", tensors["input_token_extra_ids"]) + [0] * num_tokens
    if "min_length" in tensors:
        tensors["min_length"] = max(_scalar(tensors, "min_length") - num_tokens, 0)
    if "prompt_ignore_length" in tensors:
        tensors["prompt_ignore_length"] = min(_scalar(tensors, "prompt_ignore_length"), len(prompt))
    top_p, decay, floor, reset_id = (_scalar(tensors, f"runtime_top_p{part}")
                                     for part in ("", "_decay", "_min", "_reset_ids"))
    if top_p > 0 and (decay != 1 or floor > top_p):
        if reset_id >= 0:
            raise _cannot(f"runtime_top_p_decay is {shown(decay)} and runtime_top_p_reset_ids is {shown(reset_id)}")
        tensors["runtime_top_p"] = float(top_p_after(np.array(tokens), top_p, decay, floor, reset_id))


def _ends_with_one_of(found: tuple[tuple[int, ...], ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[-len(word):]) == word for word in found)


def _scalar(tensors: dict[str, Any], name: str) -> Any:
    spec = TENSORS[name]
    return spec.default if name not in tensors else scalar(spec, tensors[name])


def _integers(name: str, values: Any) -> list[int]:
    try:
        array = np.asarray(values)
    except ValueError:                         # lists of different lengths
        raise InvalidRequestError(f"{name} mixes numbers and lists, or holds lists of different lengths",
                                  "expected a flat list, or an array whose leading dimensions are 1",
                                  "pass the tokens of one sequence in a list") from None
    if array.size and array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name} holds {array.dtype}", "token ids must be integers",
                                  "pass the tokens of the responses")
    if array.ndim == 0 or array.size not in (0, array.shape[-1]):
        raise InvalidRequestError(f"{name} has shape {list(array.shape)}" if array.ndim else f"{name} is one number",
                                  "expected a flat list, or an array whose leading dimensions are 1",
                                  "pass the tokens of one sequence in a list")
    return array.reshape(-1).tolist()


def _cannot(fact: str, is_complete: bool = False) -> InvalidRequestError:
    """Return the refusal of a request that cannot be resumed.

    is_complete   whether the responses are already the whole answer
    """
    if is_complete:
        return InvalidRequestError(fact, "such a request is complete and cannot be resumed", "use the responses")
    return InvalidRequestError(fact, "such a request cannot be resumed", "send the original request again")
