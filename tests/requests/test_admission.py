"""Admission accepts, refuses or cuts the right tensors and options, and copies the tensors that it accepts."""

import numpy as np
import pytest

from batch_manager.errors import InvalidRequestError, RequestTooLargeError
from batch_manager.handover import SlotSetup
from batch_manager.names import LlmRequestState, SchedulerPolicy
from batch_manager.requests.admission import NOT_WITH_BEAMS, usable_id
from batch_manager.requests.context_phase import ContextPhaseParams
from batch_manager.requests.inference_request import TENSORS, Content, InferenceRequest, Shape
from batch_manager.requests.response_options import ResponseOptions
from batch_manager.sampling_config import PARAMETERS, SamplingConfig

VOCAB = 100
NAN, INF = float("nan"), float("inf")

# For each tensor: valid values other than the neutral one. COMPANIONS are the tensors that must come with it.
VALID = {
    "input_ids": [[1], [[1, 2]], (1, 2), np.array([1, 2]), np.array([[99, 0]], np.uint8)],
    "input_token_extra_ids": [[0, 0, 7], np.array([[0, 0, 0]]), np.array([1, 2, 2**63 - 1], np.uint64)],
    "request_output_len": [1, [2], [[3]], np.array(4), np.array([[8]], np.int32), np.uint64(6), 2**31 - 1],
    "input_lengths": [3, "anything, nobody looks"],
    "end_id": [0, 99, [2], [2, 0], (3, 3), [[5, 6, 7]], np.array([1, 2]),
               np.array([[1, 2]], np.uint8), list(range(8))],
    "pad_id": [0, 99],
    "beam_width": [2, 4],
    "temperature": [0, 0.5, 2, np.float16(0.5), np.array([2], np.int8), -0.0],
    "runtime_top_k": [1, 100],
    "runtime_top_p": [0.5, 1, np.array([[0.25]])],
    "runtime_top_p_decay": [0.5],
    "runtime_top_p_min": [0.5],
    "runtime_top_p_reset_ids": [0, 99],
    "runtime_min_p": [0.1, 1],
    "len_penalty": [1.0],
    "early_stopping": [0, 7, -3],
    "beam_search_diversity_rate": [0.5],
    "repetition_penalty": [1.1, 0.5],
    "presence_penalty": [0.5, -0.5],
    "frequency_penalty": [0.5, -0.5],
    "no_repeat_ngram_size": [2],
    "prompt_ignore_length": [2],
    "min_length": [2],
    "random_seed": [1, 2**64 - 1, np.array([2**64 - 1], np.uint64), -1, np.array([-5])],
    "bad_words_list": [[[5, 7, 3], [9, 2]], [[[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]]],
    "stop_words_list": [[[5]], np.array([[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]])],
    "embedding_bias": [[1.0] * VOCAB, np.ones((1, VOCAB), np.float16)],
    "prompt_embedding_table": [np.ones((1, 2, 8), np.float16)],
    "prompt_vocab_size": [2],
    "lora_task_id": [0, 2**64 - 1],
    "lora_weights": [np.ones((2, 6), np.float32)],
    "context_phase_params": [ContextPhaseParams("127.0.0.1", 5, bytes(16), 8).to_array()],
    "lora_config": [[[0, 0, 4], [4, 1, 4]]],
    "draft_input_ids": [[4, 5]],
    "draft_logits": [np.zeros((2, VOCAB), np.float32)],
    "return_perf_metrics": [True, 1, np.array([True]), [1], np.bool_(True)],
    "return_top_log_probs": [1, 20],
    "raw_log_probs": [True, np.array([1])],
    "return_log_probs": [True, 1, np.array([True]), [1], np.bool_(True)],
    "return_context_logits": [True],
    "return_generation_logits": [True],
    "streaming": [True, np.array([1])],
}
COMPANIONS = {
    "prompt_embedding_table": {"prompt_vocab_size": 2},
    "prompt_vocab_size": {"prompt_embedding_table": np.ones((2, 8), np.float16)},
    "lora_weights": {"lora_task_id": 5, "lora_config": [[0, 0, 4], [4, 1, 4]]},
    "lora_config": {"lora_task_id": 5, "lora_weights": np.ones((2, 6), np.float32)},
    "draft_logits": {"draft_input_ids": [4, 5]},
}
# Tensors without an effect: input_lengths always, and pad_id with one beam. It fills the rows of shorter beams.
IGNORED = {"input_lengths"}
BEAMS_ONLY = {"pad_id"}


def wrong_values(name):
    """Return values that admission must refuse for this tensor."""
    spec = TENSORS[name]
    wrong = ["1", b"1", object(), {1: 2}, {1}, 1j, np.array([1j]), np.array(["1"]), np.array([None]),
             np.zeros(1, "M8[s]"), np.zeros(2, [("a", "i4")]), np.zeros((1, 1, 1, 1, 1)), [[[[[1]]]]], [None], range(3)]
    if spec.shape is Shape.SCALAR:
        wrong += [[], [1, 1], [[1], [1]], [[[1]]], np.ones(2), np.ones((1, 1, 1)), np.ones(0), np.ones((2, 0))]
        wrong += {Content.FLAG: [2, -1, 1.0, NAN, np.array([1.0]), np.array([7])],
                  Content.INTEGER: [True, 1.0, NAN, np.array([True]), np.array([1.0]), 10**400, 2**64, -(2**63) - 1],
                  Content.NUMBER: [True, NAN, INF, -INF, np.array([NAN]), np.array([True]), 10**400, -(10**400), 1e39]
                  }[spec.content]
    elif spec.shape is Shape.FEW:
        wrong += [[], list(range(9)), [[1], [1]], [[[1]]], np.ones((1, 1, 1), int), np.ones(0, int), np.arange(9),
                  np.ones((2, 1), int), True, 1.0, NAN, [1, True], [1, 2.0], np.array([1.0, 2.0]), [1, 10**400],
                  np.array([True, False]), [1, -1], [-1, -1], [-1, 3], [3, VOCAB], np.array([3, -1]), (1, [2])]
    else:
        wrong += [1, np.array(1), [True], [[True]], np.array([True]), np.array([[True]])]
        if spec.content is Content.INTEGER:
            wrong += [[1.0], [[1.0]], np.ones(1), np.ones((2, 1)), [10**400], [[10**400]], [[[1], [10**400]]]]
        else:
            wrong += [[NAN] * VOCAB, [[NAN] * VOCAB] * 2, np.full((2, VOCAB), INF), [10**400] * VOCAB, [1e39] * VOCAB]
    if spec.shape is Shape.WORDS or name in ("input_ids", "draft_input_ids"):
        wrong += [[token] for token in (VOCAB, -1, 2**31, 2**63, 2**64)]
        wrong += [np.array([VOCAB]), np.array([-1]), np.array([2**63], np.uint64)]
        wrong += [[[token]] for token in (VOCAB, -1, 2**63)]
    if name in ("end_id", "pad_id", "runtime_top_p_reset_ids"):
        wrong += [-2, VOCAB, 2**31, np.array([2**63], np.uint64)]
    return wrong


def admitted_fields(admitted):
    return (admitted.request.tokens, admitted.request.max_new_tokens, admitted.setup, admitted.response,
            admitted.prompt_table is None, admitted.request.draft_len, admitted.draft_logits is None,
            admitted.request.token_extra_ids, admitted.request.lora_task_id, admitted.adapter is None)


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_used_or_refused_by_name_and_never_ignored(name, admit, refusal):
    assert set(VALID) == set(TENSORS)
    for value in VALID[name]:
        tensors = {name: value} | COMPANIONS.get(name, {})
        if name == "context_phase_params":                   # tests/stores has the requests that it belongs to
            assert f"{name} is set; a generation_only request has this tensor" in refusal(**tensors)
        elif name in IGNORED | BEAMS_ONLY:
            assert admitted_fields(admit(**tensors)) == admitted_fields(admit())
        else:
            assert admitted_fields(admit(**tensors)) != admitted_fields(admit())


def test_every_sampling_knob_reaches_the_device_or_is_refused(admit):
    for tensor in (parameter.tensor for parameter in PARAMETERS.values()):
        assert admit(**{tensor: VALID[tensor][0]}).setup != admit().setup


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in IGNORED])
def test_every_tensor_refuses_values_of_a_wrong_type_rank_or_range_by_name(name, refusal):
    for value in wrong_values(name):
        text = refusal(**(COMPANIONS.get(name, {}) | {name: value}))
        assert text.startswith("[INVALID_REQUEST] request 7: ") and name in text and "cannot do that yet" not in text
        assert text.count("; ") >= 1 and len(text) < 600, text


# The range of every scalar, as documented, and values just outside.
FLOAT32, COUNT = 3.4028234663852886e38, 2**31 - 1
RANGES = {
    "request_output_len": (f"an integer in 1..{COUNT}", [0, -1, COUNT + 1]),
    "end_id": ("an integer in -1..99", [-2, 100]),
    "pad_id": ("an integer in -1..99", [-2, 100]),
    "beam_width": (f"an integer in 1..{COUNT}", [0, -1, COUNT + 1]),
    "temperature": ("a finite float32 of at least 0", [-0.5, -1, 1e39]),
    "runtime_top_k": ("an integer in 0..100", [-1, 101, 1025]),
    "runtime_top_p": ("a number in [0, 1]", [-0.5, 1.5, 2]),
    "runtime_top_p_decay": ("a number in (0, 1]", [0, 0.0, -0.5, 1.5]),
    "runtime_top_p_min": ("a number in (0, 1]", [0, 0.0, -0.5, 1.5]),
    "runtime_top_p_reset_ids": ("an integer in -1..99", [-2, 100]),
    "runtime_min_p": ("a number in [0, 1]", [-0.5, 1.5]),
    "len_penalty": ("a finite float32 of at least 0", [-0.5, 1e39]),
    "early_stopping": (f"an integer in {-COUNT - 1}..{COUNT}", [COUNT + 1, -COUNT - 2]),
    "beam_search_diversity_rate": ("a finite float32 of at least 0", [-0.5]),
    "repetition_penalty": ("a finite float32 above 0", [0, 0.0, -1.5, 1e39]),
    "presence_penalty": ("a finite float32", [1e39, -1e39]),
    "frequency_penalty": ("a finite float32", [1e39, -1e39]),
    "no_repeat_ngram_size": (f"an integer in 0..{COUNT}", [-1, COUNT + 1]),
    "prompt_ignore_length": (f"an integer in 0..{COUNT}", [-1, COUNT + 1]),
    "min_length": (f"an integer in 0..{COUNT}", [-1, COUNT + 1]),
    "random_seed": (f"an integer in {-(2**63)}..{2**64 - 1}", [2**64, -(2**63) - 1]),
    "prompt_vocab_size": (f"an integer in 1..{COUNT}", [0, -1]),
    "return_top_log_probs": ("an integer in 0..20", [-1, 21]),
    "lora_task_id": (f"an integer in {-(2**63)}..{2**64 - 1}", [2**64, -(2**63) - 1]),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_scalar_out_of_range_is_refused_with_its_name_its_value_and_the_range(name, refusal):
    expected, wrong = RANGES[name]
    for value in wrong:
        for given in (value, [value], [[value]], *([np.array(value)] if abs(value) < 2**63 else [])):
            text = refusal(**(COMPANIONS.get(name, {}) | {name: given}))
            shown = "an integer of 65 bits" if value == 2**64 else str(value)
            assert f"{name} is {shown}" in text and f"it must be {expected}" in text, text


def test_every_scalar_with_a_range_is_in_that_table():
    ranged = {name for name, spec in TENSORS.items() if spec.shape in (Shape.SCALAR, Shape.FEW)
              and spec.content is not Content.FLAG}
    assert set(RANGES) == ranged - IGNORED


@pytest.mark.parametrize("name", [name for name, spec in TENSORS.items() if spec.content is Content.NUMBER])
@pytest.mark.parametrize("value", [NAN, INF, -INF, np.float32(NAN), np.array([INF], np.float16)], ids=repr)
def test_what_is_no_number_is_no_value_of_any_tensor_of_numbers(name, value, refusal):
    given = value if TENSORS[name].shape is Shape.SCALAR else np.full((2, VOCAB), np.asarray(value).ravel()[0])
    if name == "embedding_bias":
        given = given[0]
    text = refusal(**(COMPANIONS.get(name, {}) | {name: given}))
    assert name in text and ("finite" in text or "it must be a number in" in text), text


@pytest.mark.parametrize("name, neutral", [
    *((spec.name, spec.default) for spec in TENSORS.values() if spec.default is not None),
    ("bad_words_list", []), ("bad_words_list", [[[0], [0]]]), ("bad_words_list", np.array([[0], [-1]])),
    ("stop_words_list", np.zeros((1, 2, 0), np.int32)), ("stop_words_list", [[[3, 4], [-1, -1]]]),
    ("embedding_bias", np.zeros(VOCAB, np.float32)), ("draft_input_ids", []), ("draft_input_ids", np.zeros(0, int)),
    ("prompt_vocab_size", None), ("lora_task_id", None)])
def test_a_neutral_value_is_the_same_as_a_missing_one(name, neutral, admit):
    assert admitted_fields(admit(**{name: neutral})) == admitted_fields(admit())


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_an_adapter_has_no_neutral_value(rows, refusal):
    text = refusal(lora_weights=np.zeros((rows, 8), np.float32), lora_config=np.zeros((rows, 3), int),
                   limits={"max_adapter_size": 0})
    assert ("lora_weights asks for a LoRA adapter; this engine has no cache for adapters; set "
            "TrtGptModelOptionalParams.peft_cache_config, or leave lora_weights out") in text


def test_an_ordinary_request_becomes_what_the_loop_needs(admit):
    admitted = admit(end_id=2, temperature=0.5, runtime_top_k=4, runtime_top_p=0.75, random_seed=11,
                     return_log_probs=True, flags={"is_streaming": True, "priority": 1, "deadline_s": 2,
                                                   "cache_salt": "tenant"})
    request = admitted.request
    assert (request.request_id, request.tokens, request.max_new_tokens) == (7, [[1, 2, 3]], 5)
    assert (request.priority, request.beam_width, request.draft_len) == (1.0, 1, 0)
    assert request.state is LlmRequestState.CONTEXT_INIT
    assert admitted.setup == SlotSetup(
        SamplingConfig(temperature=0.5, top_k=4, top_p=0.75, random_seed=11), request_id=7, end_id=2,
        return_log_probs=True, prompt_length=3, max_new_tokens=5)
    assert admitted.response == ResponseOptions(is_streaming=True, return_log_probs=True, deadline_s=2.0)
    assert admitted.warnings == () and admitted.request.cache_salt == "tenant"


@pytest.mark.parametrize("prompt", VALID["input_ids"], ids=str)
def test_the_prompt_is_a_list_of_plain_integers(prompt, admit):
    tokens = admit(input_ids=prompt).request.tokens[0]
    assert tokens == np.array(prompt).ravel().tolist() and {type(token) for token in tokens} == {int}


@pytest.mark.parametrize("given, seed", [
    (-1, 2**64 - 1), (np.int64(-(2**63)), 2**63), (np.uint64(2**64 - 1), 2**64 - 1)])
def test_a_negative_seed_is_the_unsigned_one_with_the_same_bits(given, seed, admit):
    assert admit(random_seed=given).setup.sampling.random_seed == seed


def test_a_negative_zero_is_zero(admit):
    setup = admit(temperature=-0.0, runtime_top_p=-0.0).setup
    assert str(setup.sampling.temperature) == str(setup.sampling.top_p) == "0.0"


def test_either_way_of_asking_for_streaming_counts(admit):
    assert admit(streaming=True).response.is_streaming
    assert admit(flags={"is_streaming": True}).response.is_streaming
    assert admit(streaming=False, flags={"is_streaming": True}).response.is_streaming
    assert not admit(streaming=[False]).response.is_streaming


def test_the_manager_decides_about_the_input_in_the_output(admit):
    assert admit(limits={"exclude_input_in_output": True}).response.exclude_input


@pytest.mark.parametrize("option, wrong", [
    ("is_streaming", [2, "yes", None, 1.0, [True, True]]), ("priority", [-0.1, 1.1, NAN, True, "high", None]),
    ("deadline_s", [0, -1, NAN, INF, True, "soon", 10**400]), ("cache_salt", [1, ["a"], "x" * 1025, b"x" * 1025])])
def test_options_that_are_no_tensors_are_checked_too(option, wrong, refusal):
    for value in wrong:
        text = refusal(flags={option: value})
        assert text.startswith("[INVALID_REQUEST] request 7: ") and option in text


@pytest.mark.parametrize("option, value, says", [
    ("priority", "high", "priority is of type str; it must be a number"),
    ("priority", True, "priority is True; it must be a number"),
    ("deadline_s", "soon", "deadline_s is of type str; it must be a number of seconds, or None"),
    ("arrival_time", 5e9, "arrival_time is 5000000000.0; it must be a number in "),
    ("arrival_time", [1, 2], "arrival_time is of type list; it must be a time in seconds of time.monotonic(), or None"),
    ("speculation", None, "speculation is of type NoneType"), ("speculation", "no", "speculation is of type str"),
    ("cache_salt", 3, "cache_salt is of type int; it must be a str, bytes or None"),
    ("cache_salt", "x" * 1025, "cache_salt has 1,025 characters; it must have at most 1,024; pass a digest"),
    ("cache_salt", b"x" * 1025, "cache_salt has 1,025 bytes; ")])
def test_an_error_of_an_option_states_its_type_and_unit(option, value, says, refusal):
    assert says in refusal(flags={option: value})


@pytest.mark.parametrize("text", ["5 6", b"5 6"])
def test_the_way_out_for_text_is_not_an_array_of_text(text, refusal):
    assert "pass integers of any width" in refusal(input_ids=text)


@pytest.mark.parametrize("value", [{}, object(), {1, 2}])
def test_the_way_out_for_an_object_that_is_no_array_is_not_an_array(value, refusal):
    assert refusal(temperature=value).endswith("; pass floats or integers")


def change_nothing(request_id, logits, token_ids):
    return logits


@pytest.mark.parametrize("wrong, says", [
    (True, "of type bool"), (3, "of type int"), ([change_nothing], "of type list"), (b"batched", "of type bytes"),
    ("bathced", "'bathced'"), ("\x1b[2J", r"'\x1b[2J'"), ("batched", "the GptManager has no batched post-processor"),
    (lambda logits: logits, "three arguments"), (lambda a, b, c, stream: b, "three arguments")])
def test_a_logits_post_processor_is_a_callable_of_three_arguments_or_the_batched_one(wrong, says, refusal):
    text = refusal(flags={"logits_post_processor": wrong})
    assert text.startswith("[INVALID_REQUEST] request 7: logits_post_processor ") and says in text
    assert text.count("; ") >= 2


def test_a_logits_post_processor_sees_the_tokens_of_its_request_at_the_time(admit):
    admitted = admit(flags={"logits_post_processor": change_nothing})
    processor = admitted.setup.logits_post_processor
    assert (processor.request_id, processor.function, processor.is_batched) == (7, change_nothing, False)
    seen = processor.token_ids()
    assert seen == [[1, 2, 3]]
    seen[0].append(9)
    admitted.request.advance_context(3)
    admitted.request.read_context(admitted.request.context_position)
    admitted.request.add_token(4)
    assert processor.token_ids() == [[1, 2, 3, 4]]


def test_the_batched_logits_post_processor_is_that_of_the_manager(admit):
    admitted = admit(flags={"logits_post_processor": "batched"}, limits={"logits_post_processor_batched": print})
    assert admitted.setup.logits_post_processor.function is print
    assert admitted.setup.logits_post_processor.is_batched
    assert admit(limits={"logits_post_processor_batched": print}).setup.logits_post_processor is None


def test_a_builtin_that_does_not_say_what_it_takes_is_believed(admit):
    assert admit(flags={"logits_post_processor": max}).setup.logits_post_processor.function is max


# Requests that the original batch manager refuses, row by row.

@pytest.mark.parametrize("name", ["input_ids", "request_output_len"])
def test_what_every_request_needs_is_asked_for_by_name(name, refusal):
    assert f"{name} is missing" in refusal(**{name: None})


def test_a_prompt_needs_a_batch_dimension_of_1(refusal):
    for prompt in ([[1, 2], [3, 4]], np.ones((2, 3), int), np.ones((1, 1, 3), int), 5):
        assert "batch dimension must be 1" in refusal(input_ids=prompt)


@pytest.mark.parametrize("empty", [[], [[]], np.zeros(0, np.int32), np.zeros((1, 0), np.int64)], ids=repr)
def test_an_empty_prompt_is_refused(empty, refusal):
    assert "input_ids is empty" in refusal(input_ids=empty)


def test_a_prompt_must_leave_room_for_one_token(admit, refusal):
    assert admit(input_ids=[1] * 63).request.max_new_tokens == 1
    for prompt in ([1] * 64, np.ones(64, int), np.broadcast_to(np.int8(1), 2**40)):
        text = refusal(input_ids=prompt)
        assert "the maximum input length is max_seq_len - 1 = 63" in text


def test_a_longer_output_than_there_is_room_for_is_cut_with_a_warning(admit):
    admitted = admit(input_ids=[1] * 60, request_output_len=10)
    assert admitted.request.max_new_tokens == 4
    assert admitted.warnings == ("request_output_len was cut from 10 to 4: the prompt has 60 tokens and "
                                 "max_seq_len is 64",)
    assert admit(input_ids=[1] * 60, request_output_len=4).warnings == ()


@pytest.mark.parametrize("length", [0, -1, 2**31, -(2**31)])
def test_an_output_has_at_least_one_token(length, refusal):
    assert f"request_output_len is {length}" in refusal(request_output_len=length)


@pytest.mark.parametrize("width", [0, -1])
def test_a_beam_width_below_one_is_refused(width, refusal):
    assert f"beam_width is {width}; it must be an integer in 1.." in refusal(beam_width=width)


def test_a_beam_width_above_the_managers_is_refused_with_both_numbers(refusal):
    text = refusal(beam_width=5)
    assert "beam_width is 5" in text and "max_beam_width is 4" in text


def test_more_ways_to_end_than_a_search_can_look_at_are_refused_with_the_numbers(admit, refusal):
    """A request is refused if its beams and its tokens that end a beam give more continuations than a step can compare.

    The text has the two numbers, the number of continuations and the limit.
    """
    words, limits = [[1, 2], *([token] for token in range(100))], dict(
        max_beam_width=200, max_num_tokens=200, num_blocks=10_000)
    for tensors in (dict(beam_width=160, stop_words_list=words), dict(stop_words_list=words), dict(beam_width=200)):
        assert admit(limits=limits, **tensors).request.beam_width == tensors.get("beam_width", 1)
    text = refusal(limits=limits, beam_width=200, stop_words_list=words)
    assert "the words of stop_words_list end in 100 different tokens, beam_width is 200 and" in text
    assert "20,200 continuations" in text and "16,384" in text


@pytest.mark.parametrize("name", sorted(NOT_WITH_BEAMS))
def test_what_is_of_one_text_is_refused_by_name_with_several(name, refusal):
    """A tensor that needs a beam width of 1 is refused if beam_width is 2. The refusal names the tensor."""
    for value in VALID[name]:
        text = refusal(beam_width=2, **({name: value} | COMPANIONS.get(name, {})))
        assert "beam_width is 2" in text and (name in text or name in COMPANIONS) and "set beam_width to 1" in text


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
                                  "bad_words_list", "stop_words_list", "embedding_bias"])
def test_what_changes_logits_reaches_the_device_with_several_beams_too(name, admit):
    for value in VALID[name]:
        setup = admit(beam_width=2, **{name: value}).setup
        assert setup.has_beams and setup != admit(beam_width=2).setup


def test_beams_reach_the_device_with_their_numbers(admit):
    admitted = admit(beam_width=3, request_output_len=7, len_penalty=0.5, early_stopping=-2,
                     beam_search_diversity_rate=0.25, end_id=9)
    assert admitted.setup.sampling == SamplingConfig(beam_width=3, len_penalty=0.5, early_stopping=-2,
                                                     beam_search_diversity_rate=0.25)
    assert admitted.setup.has_beams and admitted.setup.max_new_tokens == 7
    assert admitted.response.pad_id == 9 and len(admitted.request.tokens) == admitted.request.beam_width == 3
    assert admit(beam_width=3, end_id=9, pad_id=4).response.pad_id == 4
    assert admit(beam_width=3).response.pad_id == 0 and not admit().setup.has_beams


def test_beams_have_logits_each(admit):
    one, three = (admit(beam_width=width, request_output_len=7, return_generation_logits=True).num_bytes
                  for width in (1, 3))
    assert three - one == 2 * 7 * VOCAB * 4


def test_streaming_needs_one_beam(refusal):
    assert "Streaming mode is only supported with beam width of 1" in refusal(beam_width=2, streaming=True)


def test_a_prompt_table_and_its_size_come_together_and_agree(refusal):
    table = np.ones((2, 8), np.float16)
    assert "prompt_embedding_table is set without prompt_vocab_size" in refusal(prompt_embedding_table=table)
    assert "prompt_vocab_size is set without prompt_embedding_table" in refusal(prompt_vocab_size=2)
    assert "rows of prompt_embedding_table is 2" in refusal(prompt_embedding_table=table, prompt_vocab_size=3)


def with_first(value, table):
    table[0, 0] = value
    return table


@pytest.mark.parametrize("table, rows, says", [
    (np.ones((2, 7)), 2,
     "the number of columns of prompt_embedding_table is 7; it must be 8 (hidden_size of the model)"),
    (np.ones((3, 8)), 2, "the number of rows of prompt_embedding_table is 3; it must be 2 (prompt_vocab_size)"),
    (np.ones((2, 8)), 0, "prompt_vocab_size is 0"), (np.ones((2, 8)), 2.0, "prompt_vocab_size holds a float"),
    (np.ones(8), 1, "shape [8]"), (np.ones((2, 2, 8)), 2, "shape [2, 2, 8]"),
    (np.ones((1, 1, 2, 8)), 2, "shape [1, 1, 2, 8]"),
    (np.ones((2, 8), bool), 2, "holds bools"), (np.ones((2, 8), complex), 2, "holds complex numbers"),
    (np.ones((2, 8), object), 2, "holds Python objects"), ([[1.0] * 8, [1.0] * 7], 2, "rows of different lengths"),
    (with_first(NAN, np.ones((2, 8))), 2, "not finite at position 0"),
    (with_first(INF, np.ones((2, 8), np.float16)), 2, "not finite at position 0"),
    (with_first(1e300, np.ones((2, 8))), 2, "not finite at position 0")])
def test_a_prompt_table_that_does_not_fit_is_refused_with_what_is_wrong(table, rows, says, refusal):
    text = refusal(prompt_embedding_table=table, prompt_vocab_size=rows)
    assert text.startswith("[INVALID_REQUEST] request 7: ") and says in text


def test_a_prompt_table_is_refused_where_the_backend_takes_no_embeddings(refusal):
    text = refusal(prompt_embedding_table=np.ones((2, 8)), prompt_vocab_size=2, limits={"hidden_size": 0})
    assert "prompt_embedding_table is set and the backend takes no embeddings" in text


def test_virtual_tokens_are_part_of_the_vocabulary_of_a_request_with_a_prompt_table(refusal, admit):
    """Prompt-tuning tokens are valid in input_ids only, and only with a prompt table."""
    table = np.arange(16, dtype=np.float16).reshape(1, 2, 8)
    tensors = {"prompt_embedding_table": table, "prompt_vocab_size": 2}
    assert "outside 0..101" in refusal(input_ids=[102], **tensors)
    assert "outside 0..99" in refusal(input_ids=[100])
    assert "outside 0..99" in refusal(bad_words_list=[[101]], **tensors)
    assert "end_id is 101" in refusal(end_id=101, **tensors)
    admitted = admit(input_ids=[101, 5, 100, 101], **tensors)
    table[:] = 99
    assert admitted.request.tokens == [[101, 5, 100, 101]]
    rows = admitted.prompt_table.embeddings(np.array([5, 100, 101], np.int32))
    assert rows.dtype == np.float32 and rows.tolist() == np.arange(16).reshape(2, 8).tolist()
    assert admitted.prompt_table.embeddings(np.array([5, 6], np.int32)) is None
    assert admit().prompt_table is None


def test_prompts_with_different_tables_or_salts_never_share_blocks(admit):
    def salt(table=None, cache_salt=None):
        tensors = {} if table is None else {"prompt_embedding_table": table, "prompt_vocab_size": table.shape[-2]}
        return admit(flags={"cache_salt": cache_salt}, **tensors).request.cache_salt

    ones = np.ones((2, 8))
    salts = [salt(), salt(cache_salt="a"), salt(ones), salt(ones, "a"), salt(ones, b"a"), salt(np.ones((1, 8))),
             salt(np.ones((3, 8))), salt(with_first(1.5, np.ones((2, 8))))]
    assert len(set(salts)) == len(salts)
    assert salt(ones) == salt(np.ones((1, 2, 8), np.float16)) and salt(ones, "a") == salt(ones, "a")


def test_bytes_count_a_prompt_table_as_it_is_kept(admit):
    tensors = {"prompt_embedding_table": np.ones((2, 8), np.float16), "prompt_vocab_size": 2}
    assert admit(**tensors).num_bytes == admit().num_bytes + 8 + 4 * 2 * 8


def test_draft_logits_need_draft_tokens_and_agree_with_them(refusal):
    logits = np.zeros((2, VOCAB), np.float32)
    expected = "draft tokens must be specified when draft logits are given"
    assert f"{expected}; leave draft_logits out" in refusal(draft_logits=logits)
    assert expected in refusal(draft_logits=logits, draft_input_ids=[])
    assert "rows of draft_logits is 2" in refusal(draft_logits=logits, draft_input_ids=[1])
    assert "columns of draft_logits" in refusal(draft_logits=logits[:, 1:], draft_input_ids=[1, 2])


def test_a_deterministic_engine_takes_drafts_and_refuses_their_logits(admit, refusal):
    """How many drafts fit beside other requests decides which tokens are drawn by ratios."""
    drafts, limits = {"draft_input_ids": [1, 2]}, {"deterministic": True}
    assert admit(limits=limits, **drafts).request.draft_len == 2
    expected = "draft_logits is set, and the engine is deterministic"
    assert expected in refusal(limits=limits, draft_logits=np.zeros((2, VOCAB), np.float32), **drafts)


def test_a_prompt_with_its_draft_tokens_must_fit(refusal, admit):
    assert "the limit for both together is max_seq_len - 1 = 63" in refusal(input_ids=[1] * 60, draft_input_ids=[1] * 4)
    few = {"max_num_tokens": 6}
    prompt = {"input_ids": [1] * 4, "request_output_len": 20}
    text = refusal(limits=few, draft_input_ids=[1] * 3, **prompt)
    assert "3, and max_num_tokens is 6; without chunked context, prompt and drafts must fit one step" in text
    for limits, drafts in ((few, 2), (few | {"enable_chunked_context": True}, 3)):
        assert admit(limits=limits, draft_input_ids=[1] * drafts, **prompt).request.draft_len == drafts


@pytest.mark.parametrize(("tensors", "options", "says"), [
    ({"draft_input_ids": [1] * 5}, {}, "draft_input_ids has 5 tokens; max_draft_tokens of this engine is 4"),
    ({}, {"limits": {"max_draft_tokens": 0}}, "draft_input_ids has 1 token; max_draft_tokens of this engine"),
    ({}, {"flags": {"logits_post_processor": lambda *_: None}}, "has 1 token, and logits_post_processor is set"),
    ({"beam_width": 2}, {}, "draft_input_ids asks for speculative decoding and beam_width is 2")])
def test_draft_tokens_that_are_not_verified_are_refused(refusal, tensors, options, says):
    assert says in refusal(**{"draft_input_ids": [1]} | tensors, **options)


def test_draft_tokens_behind_the_end_of_the_output_are_cut(admit):
    admitted = admit(draft_input_ids=[5, 6, 7], request_output_len=3)
    assert admitted.request.draft_tokens == [5, 6] and "cut from 3 to 2: the request" in admitted.warnings[0]
    assert admit(draft_input_ids=[5], request_output_len=1).request.draft_len == 0


def test_lora_weights_and_their_configuration_come_together_and_agree(refusal):
    weights, config = np.ones((2, 6), np.float32), [[0, 0, 4], [4, 1, 4]]
    assert "lora_weights is set without lora_config" in refusal(lora_weights=weights)
    assert "lora_config is set without lora_weights" in refusal(lora_config=config)
    weights = {"lora_weights": weights, "lora_task_id": 5}
    assert "rows of lora_weights is 2" in refusal(**weights, lora_config=config[:1])
    assert "columns of lora_config" in refusal(**weights, lora_config=[[0, 0], [0, 0]])
    del weights["lora_task_id"]
    assert "set without lora_task_id" in refusal(**weights, lora_config=config)


def test_a_task_id_in_an_int64_tensor_counts_as_its_bits(admit):
    assert admit(lora_task_id=np.array([-1])).request.lora_task_id == 2**64 - 1


def test_logits_are_returned_only_where_the_manager_gathers_them(refusal, admit):
    for phase in ("context", "generation"):
        off = {f"gather_{phase}_logits": False}
        assert f"gather_{phase}_logits must be enabled" in refusal(limits=off, **{f"return_{phase}_logits": True})
        admit(limits=off, **{f"return_{phase}_logits": False})


def test_a_request_larger_than_the_whole_pool_is_refused_with_the_numbers(admit):
    assert admit(limits={"num_blocks": 1}).num_bytes == 32
    with pytest.raises(RequestTooLargeError) as caught:
        admit(limits={"num_blocks": 1}, request_output_len=6)
    assert caught.value.response_text() == (
        "[TOO_LARGE_FOR_KV_CACHE] request 7: input_ids has 3 tokens and request_output_len is 6; together they may "
        "need 2 blocks of 8 tokens, and the pool has 1; raise KvCacheConfig.max_tokens to 16, "
        "or shorten the request")


def test_the_pool_is_compared_with_the_output_after_it_was_cut(admit):
    assert admit(input_ids=[1] * 60, request_output_len=1000, limits={"num_blocks": 8}).request.max_new_tokens == 4


def test_a_prompt_that_no_step_can_hold_is_refused_unless_it_may_be_chunked(admit, refusal):
    few = {"max_num_tokens": 8}
    text = refusal(input_ids=[1] * 9, limits=few)
    assert "enable_chunked_context" in text and "max_num_tokens is 8" in text and "raise max_num_tokens to 9" in text
    admit(input_ids=[1] * 8, limits=few)
    admit(input_ids=[1] * 9, limits=few | {"enable_chunked_context": True})


@pytest.mark.parametrize("limits", [{}, {"scheduler_policy": SchedulerPolicy.GUARANTEED_NO_EVICT},
                                    {"enable_chunked_context": True}])
def test_a_request_may_outgrow_a_step_streaming_or_not(limits, admit):
    for streaming in (False, True):
        admitted = admit(request_output_len=40, streaming=streaming, limits={"max_num_tokens": 8} | limits)
        assert admitted.request.max_new_tokens == 40 and admitted.warnings == ()


def test_top_k_may_not_exceed_the_vocabulary_nor_1024(admit, refusal):
    assert admit(runtime_top_k=100).setup.sampling.top_k == 100
    assert "runtime_top_k is 101" in refusal(runtime_top_k=101)
    assert admit(runtime_top_k=1024, limits={"vocab_size": 5000}).setup.sampling.top_k == 1024
    assert "0..1024" in refusal(runtime_top_k=1025, limits={"vocab_size": 5000})


def test_an_invalid_value_is_reported_before_a_feature_that_is_missing(refusal):
    assert "temperature is -1" in refusal(repetition_penalty=2.0, temperature=-1)
    assert "input_ids" in refusal(beam_width=2, input_ids=[VOCAB])


# Word lists.

@pytest.mark.parametrize("value, expected", [
    ([[[5, 7, 3, 9, 2], [3, 4, 3, -1, -1]]], "the offsets do not increase"),
    ([[[5, 7, 3, 9, 2], [3, 3, -1, -1, -1]]], "the offsets do not increase"),
    ([[[5, 7, 3, 9, 2], [0, 5, -1, -1, -1]]], "the offsets do not increase"),
    ([[[5, 7, 3, 9, 2], [3, 6, -1, -1, -1]]], "beyond the 5 tokens"),
    ([[[5, 7, 3, 9, 2], [3, -1, 5, -1, -1]]], "follows the padding"),
    ([[[5, 7, 3, 9, 2], [3, -2, -1, -1, -1]]], "the offsets do not increase"),
    ([[[5, 7, 100], [2, 3, -1]]], "word 1 of stop_words_list holds an id outside 0..99 at position 0"),
    ([[5], [7, -1]], "word 1 of stop_words_list holds an id outside 0..99 at position 1"),
    ([[5], []], "word 1 of stop_words_list is empty"),
    ([[[5, 7], [2]]], "shape"), ([[[5]]], "shape"), (np.ones((3, 4), int), "shape"), ([5, 7], "shape"),
    (np.ones((2, 2, 4), int), "shape"), ([[1] * 65_537], "65,536")])
def test_word_lists_are_parsed_whole(value, expected, refusal):
    text = refusal(stop_words_list=value)
    assert "stop_words_list" in text and expected in text


def test_the_example_in_the_message_about_packed_words_is_read_as_it_says(refusal, admit):
    text = refusal(stop_words_list=[[[5, 7, 3, 9], [3, 3, -1, -1]]])
    assert "the running sums of the words' lengths" in text and "inclusive" not in text + Shape.WORDS.value
    offsets = [int(number) for number in text.split("-1: [")[1].split("] for two words of two tokens")[0].split(",")]
    assert admit(stop_words_list=[[[5, 7, 3, 9], offsets]]).setup.stop_words == ((5, 7), (3, 9))


def test_packed_words_and_lists_of_words_are_the_same():
    from batch_manager.requests.tensor_values import Bound, read_tensor, words
    spec, bound = TENSORS["bad_words_list"], Bound(100, "", 10_000)
    packed = [[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]
    for value in ([[5, 7, 3], [9, 2]], ((5, 7, 3), [9, 2]), [packed], np.array(packed), np.array([packed], np.int16)):
        assert words(read_tensor(spec, value, bound), 10) == ((5, 7, 3), (9, 2))
    # Padding after the last word may be anything: clients pad a batch of lists with zeros or the pad id.
    assert words(read_tensor(spec, np.array([[5, 7, 3, 999], [2, -1, -1, -1]]), bound), 10) == ((5, 7),)


# Order of checks, bytes, copies.

def test_bytes_count_the_tensors_and_the_logits_that_come_back(admit):
    assert admit().num_bytes == 3 * 8 + 8
    assert admit(input_ids=np.ones(3, np.int32), end_id=2).num_bytes == 3 * 4 + 8 + 8
    assert admit(return_context_logits=True).num_bytes == 40 + 3 * VOCAB * 4
    assert admit(return_generation_logits=True).num_bytes == 40 + 5 * VOCAB * 4
    assert admit(input_ids=[1] * 60, request_output_len=10, return_generation_logits=True).num_bytes == (
        62 * 8 + 4 * VOCAB * 4)


def test_a_request_of_too_many_bytes_is_refused_before_values_are_looked_at(refusal):
    assert "max_request_bytes" in refusal(input_ids=[-1] * 60, limits={"max_request_bytes": 400})
    table = np.broadcast_to(np.float16(NAN), (10**6, 10**6))
    assert "max_request_bytes" in refusal(prompt_embedding_table=table, prompt_vocab_size=10**6)


def test_bytes_are_those_of_all_tensors_together(admit, refusal):
    tensors = {"input_ids": [1] * 20, "embedding_bias": [0.0] * VOCAB}
    enough = 8 * (1 + 20 + VOCAB)
    assert admit(limits={"max_request_bytes": enough}, **tensors).num_bytes == enough
    assert "must fit into max_request_bytes" in refusal(limits={"max_request_bytes": enough - 1}, **tensors)


def test_what_runs_is_a_copy(admit):
    for prompt in (np.array([1, 2, 3]), np.array([[1, 2, 3]], np.int32), [1, 2, 3]):
        admitted = admit(input_ids=prompt)
        prompt[0] = [-5] if np.ndim(prompt) == 2 or isinstance(prompt, list) else -5
        assert admitted.request.tokens == [[1, 2, 3]]


def test_the_values_that_are_checked_are_those_of_the_copy(admission_with, monkeypatch):
    # Another thread may change the array during admission. No unchecked token gets through.
    prompt = np.array([1, 2, 3])
    request = InferenceRequest(7, {"input_ids": prompt, "request_output_len": 5})
    admission = admission_with()
    read = admission._read

    def change_after_reading(item):
        raw = read(item)
        prompt[:] = -5
        return raw

    monkeypatch.setattr(admission, "_read", change_after_reading)
    with pytest.raises(InvalidRequestError, match="position 0"):
        admission.admit(request)


def test_a_change_between_the_check_and_the_use_of_tokens_changes_nothing(admit, monkeypatch):
    prompt, find = np.array([1, 2, 3]), np.flatnonzero

    def change_after_checking(outside):
        found = find(outside)
        prompt[:] = -5
        return found

    monkeypatch.setattr(np, "flatnonzero", change_after_checking)
    assert admit(input_ids=prompt).request.tokens == [[1, 2, 3]]


def test_texts_hold_no_tokens(refusal):
    for name, value in [("input_ids", [1, 4711]), ("input_ids", np.array([1, 4711])), ("bad_words_list", [[4711]]),
                        ("draft_input_ids", [4711]), ("input_ids", [1, -4711])]:
        text = refusal(**{name: value})
        assert "4711" not in text and "position" in text


def test_the_text_of_a_wrong_token_says_where_it_stands(refusal):
    assert refusal(input_ids=[1, 2, VOCAB]) == (
        "[INVALID_REQUEST] request 7: input_ids holds an id outside 0..99 at position 2; every id must be in the "
        "model's vocabulary of 100; check that the tokenizer belongs to this model")


def test_the_text_of_a_virtual_token_without_a_row_tells_the_vocabulary_from_the_table(refusal):
    table = {"prompt_embedding_table": np.zeros((1, 5, 8), np.float32), "prompt_vocab_size": 5}
    for prompt in ([1, VOCAB + 4, VOCAB + 5], np.array([1, VOCAB + 4, VOCAB + 5])):
        assert refusal(input_ids=prompt, **table) == (
            "[INVALID_REQUEST] request 7: input_ids holds an id outside 0..104 at position 2; every id must be in "
            "the model's vocabulary of 100 or one of the 5 prompt-tuning ids after it; check that the "
            "tokenizer belongs to this model, and prompt_vocab_size to the table")


# Items that are no requests.

def test_an_item_that_is_no_request_is_refused(refusal):
    for item in (5, "request", {"request_id": 5}, object(), [InferenceRequest(1)]):
        assert "it must return InferenceRequest objects" in refusal(item)


def test_usable_ids():
    class Other:
        request_id = np.uint64(2**64 - 1)

    assert usable_id(InferenceRequest(0)) == 0 and usable_id(Other()) == 2**64 - 1
    for item in (None, 5, "x", object(), (1, 2)):
        assert usable_id(item) is None


def test_one_admission_serves_many_requests(admission_with):
    admission = admission_with()
    request = InferenceRequest(1, {"input_ids": [1, 2], "request_output_len": 2})
    first, second = admission.admit(request), admission.admit(request)
    assert first.request is not second.request and first.request.tokens[0] is not second.request.tokens[0]


# Tensors of torch.

def test_torch_tensors_are_read(admit):
    torch = pytest.importorskip("torch")
    admitted = admit(
        input_ids=torch.tensor([[4, 5, 6]], dtype=torch.int32), request_output_len=torch.tensor([[9]]),
        temperature=torch.tensor([0.5], requires_grad=True), runtime_top_p=torch.nn.Parameter(torch.tensor(0.25)),
        return_log_probs=torch.tensor([True]), end_id=torch.tensor(3, dtype=torch.int8))
    assert admitted.request.tokens == [[4, 5, 6]] and admitted.request.max_new_tokens == 9
    assert admitted.setup == SlotSetup(SamplingConfig(temperature=0.5, top_p=0.25), request_id=7, end_id=3,
                                       return_log_probs=True, prompt_length=3, max_new_tokens=9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_scalars_are_read_from_torch_tensors_of_any_float_type(dtype, shape, admit, refusal):
    torch = pytest.importorskip("torch")

    def tensor(value):
        return torch.full(shape, value, dtype=getattr(torch, dtype))

    admitted = admit(temperature=tensor(0.5), runtime_top_p=torch.nn.Parameter(tensor(0.25)),
                     presence_penalty=tensor(-3.0), flags={"priority": tensor(0.75), "deadline_s": tensor(2.0)})
    assert admitted.setup.sampling == SamplingConfig(temperature=0.5, top_p=0.25, presence_penalty=-3.0)
    assert (admitted.request.priority, admitted.response.deadline_s) == (0.75, 2.0)
    for value in (-0.5, INF, NAN):
        assert f"temperature is {value}; it must be a finite float32" in refusal(temperature=tensor(value))
    assert "temperature has shape [2]" in refusal(temperature=torch.ones(2, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_view_that_torch_negates_later_is_read(dtype, admit):
    torch = pytest.importorskip("torch")
    negated = torch.tensor([complex(0, 0.25)], dtype=getattr(torch, dtype)).conj().imag
    assert negated.is_neg() and admit(presence_penalty=negated).setup.sampling.presence_penalty == -0.25


def test_a_list_of_tensors_and_a_list_of_too_many_levels_are_named(refusal):
    for rows in ([np.array([5, 6])], [None], ["ab"], [True], [[5], np.array([5, 6])]):
        assert f"stop_words_list is a list that holds a value of type {type(rows[-1]).__name__}; it must be" in refusal(
            stop_words_list=rows)
    for name in ("request_output_len", "temperature", "end_id"):
        assert f"{name} is a list with too many levels; it must be" in refusal(**{name: [[[3]]]})


def test_torch_tensors_that_numpy_cannot_read_say_what_to_do(refusal):
    torch = pytest.importorskip("torch")
    assert ".float()" in refusal(temperature=torch.tensor([1.0]).to(torch.float8_e4m3fn))
    assert ".int()" in refusal(runtime_top_k=torch.tensor([1.0], dtype=torch.bfloat16))
    assert ".int()" in refusal(streaming=torch.tensor([1.0], dtype=torch.bfloat16))
    assert ".cpu()" in refusal(input_ids=torch.ones(3, dtype=torch.int32, device="meta"))
    assert ".to_dense()" in refusal(input_ids=torch.ones(3, dtype=torch.int32).to_sparse())
    assert "elements" in refusal(input_ids=torch.ones(1, dtype=torch.int32).expand(2**40))
    assert "complex" in refusal(temperature=torch.ones(1, dtype=torch.complex64).conj())

    class Mine(torch.Tensor):
        pass

    assert "Mine" in refusal(input_ids=torch.ones(3, dtype=torch.int32).as_subclass(Mine))


def test_a_torch_tensor_is_copied(admit):
    torch = pytest.importorskip("torch")
    prompt = torch.tensor([1, 2, 3])
    admitted = admit(input_ids=prompt)
    prompt.fill_(-7)
    assert admitted.request.tokens == [[1, 2, 3]]


STATIC = {"static_batching": True}


def test_several_end_ids_are_each_taken_once_and_the_first_pads(admit):
    admitted = admit(end_id=[9, 4, 9, 0], beam_width=2)
    assert admitted.setup.end_ids == (9, 4, 0) and admitted.response.pad_id == 9
    assert admit(end_id=-1).setup.end_ids == () == admit().setup.end_ids
    assert admit(end_id=[7]).setup == admit(end_id=7).setup


def test_nine_end_ids_and_ids_that_are_none_beside_others_are_told_so(refusal):
    """More than 8 end ids are refused, and so is an end id of -1 beside a valid one."""
    assert "it must be at most 8" in refusal(end_id=[1] * 9)
    assert "end_id is -1; it must be an integer in 0..99" in refusal(end_id=[3, -1])


def test_without_static_batches_a_request_says_nothing_of_whom_it_can_share_one_with(admit):
    """Without static batching a request has no batch key."""
    assert admit(end_id=3).request.batch_key is None


@pytest.mark.parametrize(("given", "as_another"), [
    ({}, {"end_id": -1, "pad_id": -1, "beam_width": 1}),
    ({"temperature": 0.5}, {"temperature": 1.0}),
    ({"len_penalty": 1.0}, {"len_penalty": 2.0}),
    ({}, {"return_log_probs": True}),
    ({"end_id": [3, 4]}, {"end_id": [4, 3, 4]}),
    ({"runtime_top_k": 2, "random_seed": 1}, {"random_seed": 0, "runtime_top_k": 0}),
])
def test_requests_that_can_share_a_static_batch_have_one_key(admit, given, as_another):
    assert admit(limits=STATIC, **given).request.batch_key == admit(limits=STATIC, **as_another).request.batch_key


@pytest.mark.parametrize("given", [{"end_id": 3}, {"end_id": [3, 4]}, {"pad_id": 3}, {"temperature": 1.0},
                                   {"runtime_top_k": 0}, {"len_penalty": 0.0}])
def test_requests_that_cannot_share_a_static_batch_have_different_keys(admit, given):
    assert admit(limits=STATIC, **given).request.batch_key != admit(limits=STATIC).request.batch_key


def test_in_a_static_batch_streaming_only_leaves_the_prompt_out(admit):
    streaming = admit(limits=STATIC, flags={"is_streaming": True}).response
    assert (streaming.is_streaming, streaming.exclude_input) == (False, True)
    plain = admit(limits=STATIC).response
    assert (plain.is_streaming, plain.exclude_input) == (False, False)


@pytest.mark.parametrize(("name", "value"), [("embedding_bias", [1.0] * 100), ("draft_input_ids", [1])])
def test_what_a_static_batch_has_no_place_for_is_refused_by_name(refusal, name, value):
    text = refusal(limits=STATIC, **{name: value})
    assert name in text and "TrtGptModelType.V1" in text and "InflightFusedBatching" in text
