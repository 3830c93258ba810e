"""The tensors that build_response makes: names, order, shapes, dtypes and values. They share no memory."""

import numpy as np
import pytest

from batch_manager.names import FinishReason
from batch_manager.requests.response_options import ResponseOptions
from batch_manager.responses.tensors import RESPONSE_TENSORS, build_response, streamed_token_classes

ASK_ALL = dict(return_log_probs=True, return_context_logits=True, return_generation_logits=True)


def respond(options=None, prompt=(1, 2, 3), generated=(4, 5), finish=FinishReason.LENGTH, **more):
    response = build_response(ResponseOptions(**(options or {})), prompt, generated, finish, **more)
    assert [tensor.name for tensor in response] == list(RESPONSE_TENSORS)
    return {tensor.name: tensor.tensor for tensor in response}


def described(response):
    return {name: (tensor.dtype.name, tensor.shape) for name, tensor in response.items()}


def test_the_order_is_the_documented_one():
    assert RESPONSE_TENSORS == ("output_ids", "sequence_length", "context_logits", "generation_logits",
                                "output_log_probs", "cum_log_probs", "finish_reason")


def test_a_whole_response_holds_prompt_and_generated_and_dummies():
    response = respond()
    assert described(response) == {
        "output_ids": ("int32", (1, 1, 5)), "sequence_length": ("int32", (1, 1)),
        "context_logits": ("float32", (1, 1, 1)), "generation_logits": ("float32", (1, 1, 1, 1)),
        "output_log_probs": ("float32", (1, 1, 2)), "cum_log_probs": ("float32", (1, 1)),
        "finish_reason": ("int32", (1, 1))}
    assert response["output_ids"].tolist() == [[[1, 2, 3, 4, 5]]]
    assert response["sequence_length"].tolist() == [[5]] and response["finish_reason"].tolist() == [[3]]
    assert not any(response[name].any() for name in RESPONSE_TENSORS[2:6])


def test_the_input_can_be_left_out():
    response = respond({"exclude_input": True})
    assert response["output_ids"].tolist() == [[[4, 5]]] and response["sequence_length"].tolist() == [[2]]


@pytest.mark.parametrize("new", [[9], [9, 8], [9, 8, 7]])
def test_a_streamed_response_holds_the_new_tokens_only(new):
    response = respond({"is_streaming": True}, generated=new, finish=0)
    assert response["output_ids"].tolist() == [[new]] and response["sequence_length"].tolist() == [[len(new)]]
    assert response["output_log_probs"].shape == (1, 1, len(new)) and response["finish_reason"].tolist() == [[0]]


@pytest.mark.parametrize("options", [{}, {"is_streaming": True}, {"exclude_input": True}])
@pytest.mark.parametrize("asked", [{}, ASK_ALL])
def test_a_response_without_generated_tokens_is_well_formed(options, asked):
    response = respond(options | asked, generated=[], finish=FinishReason.CANCELLED)
    length = 0 if options else 3
    assert response["output_ids"].shape == (1, 1, length) and response["sequence_length"].tolist() == [[length]]
    assert response["output_log_probs"].shape == (1, 1, 0) and response["cum_log_probs"].tolist() == [[0]]
    assert response["finish_reason"].tolist() == [[5]]


def test_what_was_asked_for_is_there():
    context, generation = np.arange(12.0).reshape(3, 4), np.arange(8.0).reshape(2, 4)
    response = respond(ASK_ALL, log_probs=[-1.0, -2.5], context_logits=context, generation_logits=generation)
    assert described(response)["context_logits"] == ("float32", (1, 3, 4))
    assert described(response)["generation_logits"] == ("float32", (1, 1, 2, 4))
    assert np.array_equal(response["context_logits"][0], context)
    assert np.array_equal(response["generation_logits"][0, 0], generation)
    assert response["output_log_probs"].tolist() == [[[-1.0, -2.5]]] and response["cum_log_probs"].tolist() == [[-3.5]]


def test_logits_may_come_in_chunks_and_rows():
    chunks = [np.ones((2, 4), np.float32), np.zeros((1, 4), np.float32)]
    rows = [np.full(4, 7, np.float32), np.full(4, 8, np.float32)]
    response = respond(ASK_ALL, log_probs=np.zeros(2, np.float32), context_logits=chunks, generation_logits=rows)
    assert response["context_logits"][0, :, 0].tolist() == [1, 1, 0]
    assert response["generation_logits"][0, 0, :, 0].tolist() == [7, 8]


def test_cumulated_log_probs_count_from_the_start_of_the_request():
    response = respond({"is_streaming": True, "return_log_probs": True}, generated=[4], log_probs=[-1.0],
                       cum_log_prob=-10.5)
    assert response["output_log_probs"].tolist() == [[[-1.0]]] and response["cum_log_probs"].tolist() == [[-10.5]]


def test_what_was_not_asked_for_is_not_sent_although_given():
    response = respond(log_probs=[-1.0, -2.0], cum_log_prob=-3.0, context_logits=np.ones((3, 4)),
                       generation_logits=np.ones((2, 4)))
    assert response["context_logits"].shape == (1, 1, 1) and response["generation_logits"].shape == (1, 1, 1, 1)
    assert not response["output_log_probs"].any() and not response["cum_log_probs"].any()


def test_context_logits_that_were_sent_before_are_a_dummy():
    response = respond(ASK_ALL | {"is_streaming": True}, generated=[4], log_probs=[-1.0], context_logits=None,
                       generation_logits=np.ones((1, 4)))
    assert response["context_logits"].shape == (1, 1, 1) and response["generation_logits"].shape == (1, 1, 1, 4)


def test_nothing_in_a_response_is_shared():
    sources = dict(log_probs=np.array([-1, -2], np.float32), context_logits=np.ones((3, 4), np.float32),
                   generation_logits=np.ones((2, 4), np.float32))
    first, second = respond(ASK_ALL, **sources), respond(ASK_ALL, **sources)
    plain, streamed = respond(), [respond({"is_streaming": True}, generated=[4], finish=0) for _ in range(2)]
    tensors = [tensor for response in (first, second, plain, *streamed) for tensor in response.values()]
    for number, tensor in enumerate(tensors):
        assert tensor.flags.writeable
        assert not any(np.shares_memory(tensor, source) for source in sources.values())
        assert not any(np.shares_memory(tensor, other) for other in tensors[:number])


def test_a_callback_that_writes_into_a_response_changes_no_other():
    for tensor in respond({"is_streaming": True}, generated=[4]).values():
        tensor.fill(99)
    clean = respond({"is_streaming": True}, generated=[4], finish=0)
    assert clean["output_ids"].tolist() == [[[4]]] and not clean["context_logits"].any()
    assert not clean["finish_reason"].any()


def test_outgoing_tensors_are_made_by_the_given_function():
    made = []
    response = respond(to_tensor=lambda array: made.append(array) or array.view())
    assert len(made) == 7 and all(response[name].base is array for name, array in zip(RESPONSE_TENSORS, made))


def test_torch_tensors_leave_with_the_documented_dtypes():
    torch = pytest.importorskip("torch")
    response = respond({"is_streaming": True}, generated=[4], to_tensor=torch.from_numpy)
    assert response["output_ids"].dtype is torch.int32 and response["context_logits"].dtype is torch.float32
    assert respond({"is_streaming": True}, generated=[], to_tensor=torch.from_numpy)["output_ids"].shape == (1, 1, 0)


def test_the_response_of_one_streamed_token_is_the_same_however_it_is_made():
    for to_tensor in (None, lambda array: array.view()):
        tensors_of_each = [[cls() for cls in streamed_token_classes(to_tensor)] for _ in range(2)]
        for tensors, token in zip(tensors_of_each, (4, 5)):
            tensors[0].token = token
        first, second = ({tensor.name: tensor.tensor for tensor in tensors} for tensors in tensors_of_each)
        expected = respond({"is_streaming": True}, generated=[4], finish=FinishReason.NOT_FINISHED, to_tensor=to_tensor)
        assert list(first) == list(expected) and described(first) == described(expected)
        assert all((first[name] == expected[name]).all() for name in RESPONSE_TENSORS)
        assert second["output_ids"].tolist() == [[[5]]]
        tensors = [*first.values(), *second.values()]
        for number, tensor in enumerate(tensors):
            assert tensor.flags.writeable and not any(np.shares_memory(tensor, other) for other in tensors[:number])
