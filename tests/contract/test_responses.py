"""The tensors of a response: names, order, dtypes, shapes and content."""

import json

import numpy as np
import pytest

NAMES = ["output_ids", "sequence_length", "context_logits", "generation_logits", "output_log_probs", "cum_log_probs",
         "finish_reason"]
DTYPES = dict(zip(NAMES, [np.int32, np.int32, np.float32, np.float32, np.float32, np.float32, np.int32]))


def shapes(response):
    return [response.tensors[name].shape for name in NAMES]


def test_names_come_in_the_documented_order_with_the_documented_dtypes(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2, 3], 4), new_request(2, [1, 2], 2, streaming=True)]
    world.run()
    for response in (*world.client.responses[1], *world.client.responses[2]):
        assert response.names == NAMES
        assert {name: tensor.dtype for name, tensor in response.tensors.items()} == DTYPES


def test_tensors_are_torch_cpu_tensors(make_world, new_request):
    torch = pytest.importorskip("torch")
    world = make_world()
    kept = []
    world.loop.callbacks._send = lambda i, tensors, final, error: kept.extend(tensors)
    world.client.pending = [new_request(1, [1, 2, 3], 4)]
    world.run()
    assert len(kept) == 7 and all(isinstance(t.tensor, torch.Tensor) and t.tensor.device.type == "cpu" for t in kept)


def test_output_holds_prompt_and_generated_tokens_unless_the_input_is_excluded(make_world, new_request):
    for exclude, prefix in ((False, [1, 2, 3]), (True, [])):
        world = make_world(exclude_input=exclude)
        world.client.pending = [new_request(1, [1, 2, 3], 4)]
        world.run()
        final = world.client.final(1)
        assert final.tokens() == prefix + world.expected([1, 2, 3], 4)
        n = len(prefix) + 4
        assert shapes(final) == [(1, 1, n), (1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 1, 4), (1, 1), (1, 1)]


def test_the_end_id_is_not_part_of_the_output(make_world, new_request):
    world = make_world()
    tokens = world.expected([1, 2], 10)
    world.client.pending = [new_request(1, [1, 2], 10, end_id=tokens[3]),
                            new_request(2, [1, 2], 10, end_id=tokens[3], streaming=True)]
    world.run()
    expected = tokens[: tokens.index(tokens[3])]
    assert world.client.final(1).tokens() == [1, 2, *expected] and world.client.final(1).finish_reason == 1
    assert world.client.streamed(2) == expected and world.client.final(2).tokens() == []


def test_an_end_id_as_the_first_token_gives_an_empty_output(make_world, new_request):
    world = make_world()
    (first,) = world.expected([1, 2], 1)
    world.client.pending = [new_request(1, [1, 2], 10, end_id=first)]
    world.run()
    assert world.client.final(1).tokens() == [1, 2]
    assert world.client.final(1).tensors["output_log_probs"].shape == (1, 1, 0)


def test_log_probs_are_real_when_asked_for_and_zeros_otherwise(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2], 5, return_log_probs=True), new_request(2, [1, 2], 5),
                            new_request(3, [1, 2], 5, return_log_probs=True, streaming=True)]
    world.run()
    asked, not_asked = world.client.final(1).tensors, world.client.final(2).tensors
    assert asked["output_log_probs"].shape == not_asked["output_log_probs"].shape == (1, 1, 5)
    assert (asked["output_log_probs"] < 0).all() and not not_asked["output_log_probs"].any()
    np.testing.assert_allclose(asked["cum_log_probs"][0, 0], asked["output_log_probs"].sum(), rtol=1e-6)
    pieces = [response.tensors["output_log_probs"] for response in world.client.responses[3]]
    assert all(piece.shape == (1, 1, 1) for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=2), asked["output_log_probs"])
    np.testing.assert_allclose(world.client.final(3).tensors["cum_log_probs"], asked["cum_log_probs"], rtol=1e-6)


def test_the_finish_reason_is_0_until_the_final_response(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2], 3, streaming=True)]
    world.run()
    assert [response.finish_reason for response in world.client.responses[1]] == [0, 0, 3]


def test_logits_come_in_the_documented_shapes_also_across_chunks_and_pauses(make_world, new_request):
    world = make_world(backend={"num_blocks": 7, "tokens_per_block": 4, "vocab_size": 50}, enable_chunked_context=True,
                       max_num_tokens=8)
    asked = {"return_context_logits": True, "return_generation_logits": True}
    world.client.pending = [new_request(i, [i + 1] * 9, 6, streaming=i == 2, **asked) for i in range(3)]
    world.run()
    alone = make_world(backend={"vocab_size": 50})
    alone.client.pending = [new_request(i, [i + 1] * 9, 6, **asked) for i in range(3)]
    alone.run()
    assert sum(json.loads(record)["Paused Requests"] for record in world.client.stats) > 0
    for i in range(2):
        tensors, expected = world.client.final(i).tensors, alone.client.final(i).tensors
        assert tensors["context_logits"].shape == (1, 9, 50) and tensors["generation_logits"].shape == (1, 1, 6, 50)
        for name in ("context_logits", "generation_logits", "output_ids"):
            np.testing.assert_array_equal(tensors[name], expected[name])
    streamed = world.client.responses[2]
    assert [response.tensors["generation_logits"].shape for response in streamed] == [(1, 1, 1, 50)] * 6
    assert [response.tensors["context_logits"].shape for response in streamed] == [(1, 9, 50)] + [(1, 1, 1)] * 5
    np.testing.assert_array_equal(
        np.concatenate([response.tensors["generation_logits"] for response in streamed], axis=2),
        alone.client.final(2).tensors["generation_logits"])


@pytest.mark.parametrize("kind", ["context", "generation"])
def test_logits_that_are_not_gathered_are_refused_by_the_name_of_the_option(make_world, new_request, kind):
    world = make_world(**{f"gather_{kind}_logits": False})
    world.client.pending = [new_request(1, [1, 2], 3, **{f"return_{kind}_logits": True}), new_request(2, [1, 2], 3)]
    world.run()
    assert world.client.final(1).code == "INVALID_REQUEST"
    assert f"enable gather_{kind}_logits in TrtGptModelOptionalParams" in world.client.final(1).error
    assert world.client.final(2).error == ""


def test_pieces_of_a_stream_fit_together_when_the_last_one_has_no_token(make_world, new_request):
    world = make_world(backend={"vocab_size": 50})
    tokens = world.expected([1, 2], 10)
    asked = {"return_log_probs": True, "return_generation_logits": True, "end_id": tokens[3]}
    assert tokens[3] not in tokens[:3]
    world.client.pending = [new_request(1, [1, 2], 10, **asked), new_request(2, [1, 2], 10, streaming=True, **asked)]
    world.run()
    pieces, whole = world.client.responses[2], world.client.final(1)
    assert pieces[-1].tensors["generation_logits"].shape == (1, 1, 0, 50)
    for name in ("generation_logits", "output_log_probs"):
        np.testing.assert_array_equal(np.concatenate([piece.tensors[name] for piece in pieces], axis=2),
                                      whole.tensors[name])


def test_generation_logits_without_a_token_have_no_rows(make_world, new_request):
    world = make_world(backend={"vocab_size": 50})
    (first,) = world.expected([1, 2], 1)
    world.client.pending = [new_request(1, [1, 2], 10, end_id=first, return_generation_logits=True)]
    world.run()
    assert world.client.final(1).tensors["generation_logits"].shape == (1, 1, 0, 50)


def test_context_logits_of_a_request_stopped_inside_its_prompt_are_the_dummy(make_world, new_request):
    world = make_world(backend={"vocab_size": 50, "tokens_per_block": 4}, enable_chunked_context=True, max_num_tokens=8)
    world.client.pending = [new_request(1, [1] * 20, 5, return_context_logits=True)]
    world.step()
    world.client.stops = {1}
    world.step()
    final = world.client.final(1)
    assert final.finish_reason == 5 and final.tokens() == [1] * 20
    assert final.tensors["context_logits"].shape == (1, 1, 1)


def test_a_response_holds_rows_of_its_own_only(make_world, new_request):
    """The logits that the engine keeps for a response are no view of an array that also has rows of other requests."""
    world = make_world(backend={"vocab_size": 50})
    world.client.pending = [new_request(i, [i], 5, return_generation_logits=True) for i in (1, 2)]
    world.step(2)
    kept = [row for delivery in world.loop.deliveries.listeners.values() for row in delivery.generation_logits]
    assert len(kept) == 4 and all(row.nbytes == (row if row.base is None else row.base).nbytes for row in kept)
