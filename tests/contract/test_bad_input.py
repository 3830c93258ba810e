"""C7, C8, C20: each kind of bad request gets its refusal, and the other requests are not affected.

The rows of REFUSED are requests that TensorRT-LLM's batch manager cannot run, according to its documentation.
"""

import json

import numpy as np
import pytest

from batch_manager import InferenceRequest, InvalidRequestError, SchedulerPolicy

GOOD = {"input_ids": [1, 2, 3], "request_output_len": 4}
STREAMING = {"streaming": True}

REFUSED = {
    "input_ids missing": ({"input_ids": None}, "INVALID_REQUEST", "input_ids"),
    "input_ids empty": ({"input_ids": []}, "INVALID_REQUEST", "input_ids"),
    "input_ids with a batch dimension of 2": ({"input_ids": np.ones((2, 3), np.int32)}, "INVALID_REQUEST",
                                              "batch dimension"),
    "input_ids of rank 3": ({"input_ids": np.ones((1, 1, 3), np.int32)}, "INVALID_REQUEST", "input_ids"),
    "input_ids that are floats": ({"input_ids": [1.0, 2.0]}, "INVALID_REQUEST", "input_ids"),
    "input_ids outside the vocabulary": ({"input_ids": [1, 1000]}, "INVALID_REQUEST", "0..999"),
    "a negative token": ({"input_ids": [1, -1]}, "INVALID_REQUEST", "0..999"),
    "request_output_len missing": ({"request_output_len": None}, "INVALID_REQUEST", "request_output_len"),
    "request_output_len of 0": ({"request_output_len": 0}, "INVALID_REQUEST", "request_output_len"),
    "a scalar with two elements": ({"temperature": [0.5, 0.5]}, "INVALID_REQUEST", "temperature"),
    "a prompt longer than max_seq_len - 1": ({"input_ids": [1] * 64}, "INVALID_REQUEST", "64"),
    "prompt and draft tokens": ({"draft_input_ids": [1, 2]}, "INVALID_REQUEST", "draft_input_ids"),
    "draft logits without draft tokens": ({"draft_logits": np.zeros((2, 1000), np.float32)}, "INVALID_REQUEST",
                                          "draft_input_ids"),
    "a beam width of 0": ({"beam_width": 0}, "INVALID_REQUEST", "beam_width"),
    "a beam width over the maximum": ({"beam_width": 2}, "INVALID_REQUEST", "beam_width"),
    "streaming with beams": ({"beam_width": 2, "streaming": True}, "INVALID_REQUEST",
                             "Streaming mode is only supported with beam width of 1"),
    "a prompt table without its size": ({"prompt_embedding_table": np.zeros((1, 2, 8), np.float32)}, "INVALID_REQUEST",
                                        "prompt_vocab_size"),
    "a prompt vocabulary without its table": ({"prompt_vocab_size": 2}, "INVALID_REQUEST", "prompt_embedding_table"),
    "a LoRA id that is not known": ({"lora_task_id": 3}, "INVALID_REQUEST", "lora_task_id"),
    "a top_k out of range": ({"runtime_top_k": -1}, "INVALID_REQUEST", "runtime_top_k"),
    "a top_p out of range": ({"runtime_top_p": 1.5}, "INVALID_REQUEST", "runtime_top_p"),
    "a negative temperature": ({"temperature": -0.5}, "INVALID_REQUEST", "temperature"),
    "a temperature that is not a number": ({"temperature": float("nan")}, "INVALID_REQUEST", "temperature"),
    "an infinite temperature": ({"temperature": float("inf")}, "INVALID_REQUEST", "temperature"),
    "a bool as a number": ({"temperature": True}, "INVALID_REQUEST", "temperature"),
    "a seed beyond 64 bits": ({"random_seed": 2**64}, "INVALID_REQUEST", "random_seed"),
    "an end id outside the vocabulary": ({"end_id": 1000}, "INVALID_REQUEST", "end_id"),
    "more blocks than the pool has": ({"input_ids": [1] * 60}, "TOO_LARGE_FOR_KV_CACHE", "blocks"),
    "a stop word outside the vocabulary": ({"stop_words_list": [[5, 1000]]}, "INVALID_REQUEST", "stop_words_list"),
    "an empty bad word": ({"bad_words_list": [[5], []]}, "INVALID_REQUEST", "bad_words_list"),
    "a repetition penalty of 0": ({"repetition_penalty": 0.0}, "INVALID_REQUEST", "repetition_penalty"),
    "a bias for another vocabulary": ({"embedding_bias": [0.5] * 999}, "INVALID_REQUEST", "embedding_bias"),
    "a bias that is not a number": ({"embedding_bias": [float("nan")] * 1000}, "INVALID_REQUEST", "embedding_bias"),
    "a draft in an engine that verifies none": ({"draft_input_ids": [5]}, "INVALID_REQUEST", "draft_input_ids"),
    "an adapter, not built yet": ({"lora_task_id": 7}, "INVALID_REQUEST", "lora_task_id"),
}


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize("row", REFUSED)
def test_a_bad_request_gets_its_refusal_and_nothing_changes_for_the_others(make_world, new_request, policy, row):
    change, code, says = REFUSED[row]
    tensors = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    world = make_world(policy=policy, backend={"max_seq_len": 64, "num_blocks": 7, "tokens_per_block": 8})
    world.client.pending = [new_request(1, [5, 6, 7], 6, streaming=True), InferenceRequest(2, tensors),
                            new_request(3, [8, 9], 6)]
    world.step()
    refusal = world.client.final(2)
    assert refusal.code == code and says in refusal.error and refusal.tensors == {}
    world.run()
    assert world.client.streamed(1) == world.expected([5, 6, 7], 6)
    assert world.client.final(3).tokens() == [8, 9, *world.expected([8, 9], 6)]


def test_an_unknown_tensor_name_raises_where_the_request_is_built_and_suggests_the_nearest(new_request):
    with pytest.raises(InvalidRequestError, match="runtime_top_k"):
        InferenceRequest(1, {**GOOD, "runtime_topk": 3})
    request = InferenceRequest(1, GOOD)
    with pytest.raises(InvalidRequestError, match="temperature"):
        request.temprature = 0.5


def test_an_output_length_beyond_the_longest_sequence_is_cut_with_a_warning_in_the_statistics(make_world, new_request):
    world = make_world(backend={"max_seq_len": 16})
    world.client.pending = [new_request(1, [1] * 10, 500)]
    world.run()
    assert world.client.final(1).tokens() == [1] * 10 + world.expected([1] * 10, 6)
    assert json.loads(world.client.stats[-1])["Clamped Requests"] == 1


def test_logits_are_refused_when_the_engine_does_not_gather_them(make_world, new_request):
    world = make_world(gather_context_logits=False, gather_generation_logits=False)
    world.client.pending = [new_request(1, [1], 2, return_context_logits=True),
                            new_request(2, [1], 2, return_generation_logits=True), new_request(3, [1], 2)]
    world.run()
    assert "gather_context_logits" in world.client.final(1).error
    assert "gather_generation_logits" in world.client.final(2).error
    assert world.client.final(3).error == ""


def test_a_prompt_that_no_step_can_hold_is_refused_unless_it_may_be_chunked(make_world, new_request):
    for chunked, code in ((False, "INVALID_REQUEST"), (True, "")):
        world = make_world(max_num_tokens=16, enable_chunked_context=chunked)
        world.client.pending = [new_request(1, [1] * 40, 3)]
        world.run()
        assert world.client.final(1).code == code


def test_a_streamed_request_that_outgrows_a_step_is_not_refused_and_goes_on_after_a_pause(make_world, new_request):
    """A request runs to its end although its prompt and output exceed max_num_tokens when it continues after a pause.

    Although chunked context is off, its context is then computed in chunks of whole blocks.
    """
    world = make_world(max_num_tokens=16, policy=SchedulerPolicy.MAX_UTILIZATION,
                       backend={"num_blocks": 9, "tokens_per_block": 4})
    world.client.pending = [new_request(i, [i] * 10, 14, streaming=i != 2) for i in (1, 2, 3)]
    world.run()
    for i in (1, 3):
        assert world.client.streamed(i) == world.expected([i] * 10, 14)
    assert world.client.final(2).tokens() == [2] * 10 + world.expected([2] * 10, 14)
    assert json.loads(world.client.stats[-1])["Recomputed Tokens"] > 16


def test_c8_the_refusal_of_a_request_too_large_for_the_pool_says_the_numbers_under_both_policies(
        make_world, new_request):
    for policy in SchedulerPolicy:
        world = make_world(policy=policy, backend={"num_blocks": 4, "tokens_per_block": 8})
        world.client.pending = [new_request(1, [1] * 20, 13), new_request(2, [1] * 20, 12)]
        world.run()
        assert world.client.final(1).code == "TOO_LARGE_FOR_KV_CACHE"
        assert "5 blocks" in world.client.final(1).error and "4" in world.client.final(1).error
        assert world.client.final(2).error == ""


def test_c20_bounds_hold_by_default_and_beyond_them_a_request_is_refused_at_once(make_world, new_request):
    world = make_world(max_bytes_in_flight=20_000, backend={"vocab_size": 1000})
    world.client.pending = [new_request(1, [1] * 3, 2, return_context_logits=True),
                            new_request(2, [1] * 3, 2, return_context_logits=True)]
    world.step()
    assert world.client.final(2).code == "QUEUE_FULL" and "max_bytes_in_flight" in world.client.final(2).error
    world.run()
    world.client.pending = [new_request(2, [1] * 3, 2, return_context_logits=True)]
    world.run()
    assert [response.code for response in world.client.finals(2)] == ["QUEUE_FULL", ""]

    world = make_world(max_request_bytes=64)
    world.client.pending = [new_request(1, [1] * 100, 2)]
    world.run()
    assert world.client.final(1).code == "INVALID_REQUEST" and "bytes" in world.client.final(1).error

    world = make_world(max_batch_size=1, max_queued_tokens=10)
    world.loop.callbacks.fetched._get = lambda n: [new_request(i, [1] * 6, 2) for i in range(3)] if n else []
    world.step()
    assert world.client.final(2).code == "QUEUE_FULL" and "max_queued_tokens" in world.client.final(2).error
