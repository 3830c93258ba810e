"""A resumed request gets the tokens that it would have had without the interruption."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from batch_manager import InferenceRequest, InvalidRequestError, KvCacheRetentionConfig, resume
from tests.resume.random_requests import cut, differences, drawn_tensors, outcomes, small_engine

MODEL = Path(__file__).parents[2] / "examples/models/austen-4m"


def test_random_requests_go_on_identically_on_another_engine():
    draw = random.Random(1)
    requests = [InferenceRequest(number, drawn_tensors(draw)) for number in range(60)]
    whole = outcomes(MODEL, requests)
    resumed = cut(requests, whole, draw)
    assert len(resumed) >= 40
    after = outcomes(MODEL, [request for request, _ in resumed.values()], **small_engine())
    assert differences(whole, resumed, after) == []


def test_what_counts_what_is_left_is_changed_and_the_rest_is_kept():
    """`resume` adjusts the tensors that are numbers of tokens, and keeps all other values of the request."""
    processor, retention = lambda *_: None, KvCacheRetentionConfig()
    request = InferenceRequest(
        2**64 - 1, {"input_ids": torch.tensor([[5, 6, 7]]), "request_output_len": np.int32(10), "min_length": [[4]],
                    "prompt_ignore_length": 99, "input_token_extra_ids": [1, 2, 3], "input_lengths": 3,
                    "temperature": 0.5, "stop_words_list": [[8, 9]]},
        is_streaming=True, priority=0.7, deadline_s=3.0, cache_salt="salt", speculation=False,
        logits_post_processor=processor, kv_cache_retention_config=retention)
    before = request.input_tensors
    resumed = resume(request, np.array([8, 2], np.int32))
    assert resumed.input_tensors == {
        "input_ids": [5, 6, 7, 8, 2], "request_output_len": 8, "min_length": 2, "prompt_ignore_length": 3,
        "input_token_extra_ids": [1, 2, 3, 0, 0], "temperature": 0.5, "stop_words_list": [[8, 9]]}
    assert resumed.request_id == request.request_id and resumed.is_streaming and resumed.priority == 0.7
    assert (resumed.deadline_s, resumed.cache_salt, resumed.speculation) == (3.0, "salt", False)
    assert resumed.logits_post_processor is processor and resumed.kv_cache_retention_config is retention
    assert request.input_tensors == before
    twice = resume(resumed, [1, 1, 1])
    assert (twice.request_output_len, twice.min_length, twice.prompt_ignore_length) == (5, 0, 3)
    assert resume(request, []).input_tensors == before


def test_top_p_begins_where_it_had_got_to():
    """A request with top-p decay resumes with the top-p that the decay had reached at the cut."""
    tensors = {"input_ids": [1], "request_output_len": 9, "runtime_top_p": 0.8, "runtime_top_p_decay": 0.5,
               "runtime_top_p_min": 0.15}
    request = InferenceRequest(1, tensors)
    assert resume(request, [4]).runtime_top_p == float(np.float32(0.8) * np.float32(0.5))
    assert resume(request, [4] * 5).runtime_top_p == float(np.float32(0.15))
    assert resume(resume(request, [4]), [4]).runtime_top_p == resume(request, [4, 4]).runtime_top_p
    assert resume(InferenceRequest(1, {**tensors, "runtime_top_p_decay": 1.0}), [4]).runtime_top_p == 0.8


@pytest.mark.parametrize("more, tokens, message", [
    ({"beam_width": 2}, [1], "beam_width is 2; such a request cannot be resumed; send the original request again"),
    ({"return_context_logits": True}, [1], "return_context_logits is True"),
    ({"draft_input_ids": [1]}, [1], "draft_input_ids is set"),
    ({"runtime_top_p": 0.9, "runtime_top_p_decay": 0.9, "runtime_top_p_reset_ids": 4}, [1], "top_p_reset_ids is 4"),
    ({}, [1] * 5, "request_output_len is 5 and the responses have 5 tokens already; such a request is "
     "complete and cannot be resumed; use the responses"),
    ({"stop_words_list": [[7], [8, 9]]}, [3, 8, 9], "tokens has 3 tokens and ends with a stop word; such a "
     "request is complete and cannot be resumed; use the responses"),
    ({"stop_words_list": np.array([[2, 8, 9, 5], [2, 4, -1, -1]])}, [8],
     "tokens has 1 token and ends with a stop word"),
    ({"end_id": 9}, [3, 9], "tokens has 2 tokens and ends with an end id; such a request is complete"),
    ({"end_id": [7, 9]}, [9], "tokens has 1 token and ends with an end id"),
    ({"request_output_len": None}, [1], "request_output_len is missing"),
    ({}, [0.5], "tokens holds float64"),
    ({}, "no", "tokens holds"),
    ({}, [[1], [2, 3]], "tokens"),
    ({}, 3, "tokens is one number; expected a flat list"),
    ({}, [[1], [2]], r"tokens has shape \[2, 1\]; expected a flat list"),
    ({}, [[1, 2], [3, 4]], r"tokens has shape \[2, 2\]"),
    ({"input_ids": [[1], [2]]}, [1], r"input_ids has shape \[2, 1\]"),
])
def test_what_cannot_be_resumed_is_refused_by_name(more, tokens, message):
    request = InferenceRequest(1, {"input_ids": [1, 2], "request_output_len": 5, **more})
    with pytest.raises(InvalidRequestError, match=message):
        resume(request, tokens)


@pytest.mark.parametrize("tokens", [(3, 4), np.array([3, 4]), [[3, 4]], np.array([[[3, 4]]])], ids=str)
def test_a_row_of_tokens_may_have_leading_dimensions_of_1(tokens):
    assert resume(InferenceRequest(1, {"input_ids": [[1, 2]], "request_output_len": 5}), tokens).input_ids == [
        1, 2, 3, 4]
    assert resume(InferenceRequest(1, {"input_ids": [1], "request_output_len": 5}), []).input_ids == [1]


@pytest.mark.parametrize("tokens", [[9, 8], [8, 9, 1], [2]])
def test_a_stop_word_that_is_not_whole_ended_nothing(tokens):
    request = InferenceRequest(1, {"input_ids": [1, 2], "request_output_len": 5, "stop_words_list": [[8, 9, 7]]})
    assert resume(request, tokens).input_ids == [1, 2, *tokens]


@pytest.mark.parametrize("end_id", [-1, 5, [5, 7], np.array([[5]])])
def test_tokens_that_do_not_end_with_an_end_id_continue(end_id):
    request = InferenceRequest(1, {"input_ids": [1, 2], "request_output_len": 5, "end_id": end_id})
    assert resume(request, [3, 4]).input_ids == [1, 2, 3, 4]


def test_what_is_no_request_is_named():
    with pytest.raises(InvalidRequestError, match="request is of type dict; expected an InferenceRequest"):
        resume({}, [1])
