"""InferenceRequest has the documented tensor names and ids, and its constructor refuses wrong arguments."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from batch_manager.errors import InvalidRequestError
from batch_manager.requests.inference_request import TENSORS, InferenceRequest

DOCUMENTED = [
    "input_ids", "input_token_extra_ids", "request_output_len", "end_id", "pad_id", "beam_width", "temperature",
    "runtime_top_k", "runtime_top_p", "runtime_top_p_decay", "runtime_top_p_min", "runtime_top_p_reset_ids",
    "runtime_min_p", "len_penalty", "early_stopping", "beam_search_diversity_rate", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "prompt_ignore_length", "no_repeat_ngram_size", "min_length",
    "random_seed", "bad_words_list", "stop_words_list", "embedding_bias", "prompt_embedding_table",
    "prompt_vocab_size", "lora_task_id", "lora_weights",
    "lora_config", "draft_input_ids", "draft_logits", "return_log_probs", "return_context_logits",
    "return_generation_logits", "input_lengths", "streaming", "return_perf_metrics",
    "return_top_log_probs", "raw_log_probs", "context_phase_params",
]


def test_every_documented_tensor_is_in_the_table_and_no_other():
    assert sorted(TENSORS) == sorted(DOCUMENTED)


@pytest.mark.parametrize("name", [*DOCUMENTED, "max_new_tokens", "length_penalty"])
def test_every_tensor_is_a_property_that_gives_back_the_value_as_given(name):
    request = InferenceRequest(1)
    assert getattr(request, name) is None

    value = object()
    setattr(request, name, value)
    assert getattr(request, name) is value

    setattr(request, name, None)
    assert getattr(request, name) is None and request.input_tensors == {}


def test_an_alias_and_the_wire_name_are_one_tensor():
    request = InferenceRequest(1, {"max_new_tokens": 4})
    assert request.request_output_len == 4 and request.input_tensors == {"request_output_len": 4}
    for names in (["max_new_tokens", "request_output_len"], ["request_output_len", "max_new_tokens"]):
        said = f"given twice, as {names[0]} and as {names[1]}; .*leave {names[1]} "
        with pytest.raises(InvalidRequestError, match=said):
            InferenceRequest(1, dict.fromkeys(names, 4))


def test_none_in_the_mapping_is_a_missing_tensor():
    assert InferenceRequest(1, {"end_id": None}).input_tensors == {}


@pytest.mark.parametrize("wrong, nearest", [
    ("temprature", "temperature"), ("top_k", "runtime_top_k"), ("stop_words", "stop_words_list"),
    ("max_tokens", "max_new_tokens"), ("input_id", "input_ids"), ("min_p", "runtime_min_p")])
def test_an_unknown_name_is_refused_at_construction_and_suggests_the_nearest(wrong, nearest):
    with pytest.raises(InvalidRequestError, match=f"Invalid tensor name: '{wrong}'.*did you mean '{nearest}'"):
        InferenceRequest(1, {wrong: 1})
    with pytest.raises(InvalidRequestError, match=f"did you mean '{nearest}'"):
        setattr(InferenceRequest(1), wrong, 1)


@pytest.mark.parametrize("name", [3, None, b"end_id", ("end_id",), "", "\n", "x" * 10_000])
def test_a_name_that_is_no_name_is_refused_with_a_short_text_of_one_line(name):
    with pytest.raises(InvalidRequestError) as caught:
        InferenceRequest(1, {name: 1})
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


@pytest.mark.parametrize("request_id", [0, 1, 2**63, 2**64 - 1, np.uint64(2**64 - 1), np.int8(5)])
def test_ids_are_integers_of_64_bits(request_id):
    request = InferenceRequest(request_id)
    assert request.request_id == int(request_id) and type(request.request_id) is int


@pytest.mark.parametrize("request_id", [-1, 2**64, 10**4000, True, np.bool_(True), 1.0, "1", None, [1], np.array([1])])
def test_anything_else_is_no_id(request_id):
    with pytest.raises(InvalidRequestError, match="request_id"):
        InferenceRequest(request_id)


def test_the_id_cannot_be_changed():
    with pytest.raises(AttributeError):
        InferenceRequest(1).request_id = 2


def test_tensors_must_be_a_mapping():
    with pytest.raises(InvalidRequestError, match="mapping"):
        InferenceRequest(1, [("end_id", 1)])


def test_values_are_not_looked_at_when_the_object_is_built():
    InferenceRequest(1, {"input_ids": object(), "beam_width": "many"}, is_streaming="maybe", priority="high")


def test_a_subclass_may_declare_attributes_of_its_own():
    class Tagged(InferenceRequest):
        client = None

    request = Tagged(1, {"end_id": 2})
    request.client = "somebody"
    assert (request.client, request.end_id) == ("somebody", 2)
    with pytest.raises(InvalidRequestError):
        request.clinet = "somebody"


def test_a_request_survives_pickling():
    request = pickle.loads(pickle.dumps(InferenceRequest(9, {"end_id": 2}, is_streaming=True, priority=1.0)))
    assert (request.request_id, request.end_id, request.is_streaming, request.priority) == (9, 2, True, 1.0)


def test_a_request_prints_names_and_no_tokens():
    text = repr(InferenceRequest(9, {"input_ids": [4711]}))
    assert "9" in text and "input_ids" in text and "4711" not in text


def test_requests_do_not_load_torch():
    code = "import sys, batch_manager.requests.admission; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
