"""T8: requests just below, at and just beyond each limit of the engine run, wait, are refused or are cut short."""

import json

import numpy as np
import pytest

from batch_manager import InferenceRequest, SchedulerPolicy, TrtGptModelType
from batch_manager.arguments import EngineArguments
from batch_manager.config import TrtGptModelOptionalParams
from batch_manager.errors import ConfigError, counted
from batch_manager.options import resolve_limits

AT = pytest.mark.parametrize("beside", [-1, 0, 1])
POLICIES = pytest.mark.parametrize("policy", list(SchedulerPolicy))


class Steps:
    """An `on_step` hook that records the number of sequences and of tokens of each step."""

    def __init__(self):
        self.sequences, self.tokens = [], []

    def __call__(self, batch):
        self.sequences.append(batch.num_sequences)
        self.tokens.append(batch.num_context_tokens + len(batch.generation.slots) * batch.generation.beam_width)


def hand_over_at_once(world, requests):
    """Let one call of get return all requests, whatever its argument."""
    world.loop.callbacks.fetched._get = lambda most: [requests.pop(0) for _ in range(len(requests))]


@POLICIES
@AT
def test_max_batch_size_sequences_are_in_a_step(make_world, new_request, policy, beside):
    steps = Steps()
    world = make_world(policy=policy, max_batch_size=4, max_num_sequences=-1, backend={"on_step": steps})
    world.client.pending = [new_request(i, [i], 3) for i in range(1, 5 + beside)]
    world.run()
    assert max(steps.sequences) == min(4 + beside, 4)
    assert [world.client.final(i).tokens() for i in range(1, 5 + beside)] == [
        [i, *world.expected([i], 3)] for i in range(1, 5 + beside)]


@POLICIES
@AT
@pytest.mark.parametrize("chunked", [False, True])
def test_max_num_tokens_are_in_a_step(make_world, new_request, policy, beside, chunked):
    steps = Steps()
    world = make_world(policy=policy, max_num_tokens=16, enable_chunked_context=chunked, backend={"on_step": steps})
    world.client.pending = [new_request(1, [1] * 8, 1), new_request(2, [2] * (8 + beside), 1)]
    world.run()
    assert max(steps.tokens) <= 16 and len(steps.tokens) == (1 if beside <= 0 else 2)
    assert all(world.client.final(i).error == "" for i in (1, 2))


@AT
def test_max_seq_len_cuts_what_is_asked_for(make_world, new_request, beside):
    world = make_world(max_seq_len=16)
    world.client.pending = [new_request(1, [1] * 10, 6 + beside)]
    world.run()
    assert world.client.final(1).tokens() == [1] * 10 + world.expected([1] * 10, min(6 + beside, 6))
    assert json.loads(world.client.stats[-1])["Clamped Requests"] == (beside > 0)


@AT
def test_max_seq_len_is_at_most_the_models(make_world, beside):
    info = make_world(backend={"max_seq_len": 32}).backend.info
    params = TrtGptModelOptionalParams(max_seq_len=32 + beside)
    if beside <= 0:
        assert resolve_limits(EngineArguments(optional_params=params), info).max_seq_len == 32 + beside
        return
    with pytest.raises(ConfigError, match="max_seq_len is 33; the model has positions for 32 tokens"):
        resolve_limits(EngineArguments(optional_params=params), info)


@AT
@pytest.mark.parametrize("options, policy", [
    ({"enable_chunked_context": True}, SchedulerPolicy.GUARANTEED_NO_EVICT), ({}, SchedulerPolicy.MAX_UTILIZATION)])
def test_a_step_holds_a_block_where_it_must(make_world, options, policy, beside):
    info = make_world(backend={"tokens_per_block": 8}).backend.info
    arguments = EngineArguments(
        scheduler_policy=policy, optional_params=TrtGptModelOptionalParams(max_num_tokens=8 + beside, **options))
    if beside >= 0:
        assert resolve_limits(arguments, info).max_num_tokens == 8 + beside
        return
    with pytest.raises(ConfigError, match="max_num_tokens is 7 and a KV cache block holds 8 tokens"):
        resolve_limits(arguments, info)


@AT
def test_max_num_sequences_are_active_and_the_others_wait(make_world, new_request, beside):
    world = make_world(max_num_sequences=3)
    hand_over_at_once(world, [new_request(i, [i], 4) for i in range(1, 4 + beside)])
    world.step()
    assert len(world.loop.active) == min(3 + beside, 3) and len(world.loop.intake) == max(beside, 0)
    world.run()
    assert all(world.client.final(i).error == "" for i in range(1, 4 + beside))


def test_get_is_asked_for_the_room_there_is(make_world, new_request):
    world = make_world(max_num_sequences=2)
    world.client.pending = [new_request(i, [i], 3) for i in (1, 2, 3)]
    world.run()
    assert max(world.client.asked) == 2 and min(world.client.asked) == 0
    unbounded = make_world(max_num_sequences=-1)
    unbounded.step()
    assert unbounded.client.asked == [-1]


@AT
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_max_queued_requests_wait_and_one_more_is_refused(make_world, new_request, beside, bound):
    count = 1 + bound + beside
    world = make_world(max_num_sequences=1, max_queued_requests=bound)
    hand_over_at_once(world, [new_request(i, [i], 2) for i in range(1, 1 + count)])
    world.step()
    refused = [i for i in range(1, 1 + count) if world.client.finals(i)]
    assert refused == ([count] if beside > 0 else [])
    for i in refused:
        assert world.client.final(i).code == "QUEUE_FULL"
        queue = f"the queue has {counted(bound, 'request')} already; max_queued_requests is {bound}"
        assert queue in world.client.final(i).error
    world.run()
    assert all(world.client.final(i).error == "" for i in range(1, 1 + count) if i not in refused)


@AT
def test_max_queued_tokens_wait_and_one_more_is_refused(make_world, new_request, beside):
    world = make_world(max_num_sequences=1, max_queued_tokens=10)
    requests = [new_request(1, [1] * 30, 2), new_request(2, [2] * 6, 2), new_request(3, [3] * (4 + beside), 2)]
    hand_over_at_once(world, requests)
    world.step()
    finals = world.client.finals(3)
    assert [final.code for final in finals] == (["QUEUE_FULL"] if beside > 0 else [])
    for final in finals:
        assert "with its 5 prompt tokens, 11 would be queued; max_queued_tokens is 10" in final.error


@AT
def test_max_request_bytes_and_max_bytes_in_flight(make_world, beside):
    def asks(request_id):      # two numbers, four tokens of int32, and the logits of four rows of 1,000 float32
        return InferenceRequest(request_id, {"request_output_len": 2, "return_context_logits": True,
                                             "input_ids": np.ones(4, np.int32)})

    tensors, logits = 8 + 8 + 16, 4 * 1000 * 4
    world = make_world(max_bytes_in_flight=2 * (tensors + logits) + beside, max_request_bytes=tensors)
    world.client.pending = [asks(1), asks(2)]
    world.step()
    finals = world.client.finals(2)
    if beside < 0:
        (final,) = finals
        assert final.code == "QUEUE_FULL" and final.tensors == {}
        assert f"max_bytes_in_flight is {2 * (tensors + logits) - 1:,}" in final.error
        assert f"it needs {tensors + logits:,} bytes" in final.error
        assert f"{tensors + logits:,} are in use" in final.error
        world.run()
        world.client.pending = [asks(2)]           # no bytes are in flight any more
    world.run()
    assert world.client.finals(2)[-1].error == "" and world.client.final(1).error == ""

    world = make_world(max_request_bytes=tensors + beside)
    world.client.pending = [asks(1)]
    world.run()
    assert world.client.final(1).code == ("INVALID_REQUEST" if beside < 0 else "")
    assert ("max_request_bytes" in world.client.final(1).error) == (beside < 0)


@AT
def test_max_admissions_are_looked_at_in_one_iteration(make_world, beside):
    assert TrtGptModelOptionalParams().max_admissions_per_iteration == 4096
    world = make_world(max_num_sequences=-1)
    hand_over_at_once(world, [InferenceRequest(i, {}) for i in range(4096 + beside)])    # each is refused at once
    world.step()
    assert sum(map(len, world.client.responses.values())) == min(4096 + beside, 4096)
    world.run()
    assert all(world.client.final(i).code == "INVALID_REQUEST" for i in range(4096 + beside))


@pytest.mark.parametrize("beside", [-0.001, 0.0, 0.001])
def test_a_deadline_ends_a_request_when_it_has_come(make_world, new_request, beside):
    world = make_world()
    world.client.pending = [new_request(1, [1], 50, deadline_s=5)]
    world.step(3)
    world.clock.now += 5 + beside
    world.step()
    assert [final.finish_reason for final in world.client.finals(1)] == ([] if beside < 0 else [4])


@pytest.mark.parametrize("beside", [-0.001, 0.0, 0.001])
def test_a_deadline_ends_a_request_that_waits(make_world, new_request, beside):
    world = make_world(max_num_sequences=1)
    hand_over_at_once(world, [new_request(1, [1], 50), new_request(2, [2], 5, deadline_s=5)])
    world.step(3)
    world.clock.now += 5 + beside
    world.step()
    assert [final.code for final in world.client.finals(2)] == ([] if beside < 0 else ["DEADLINE"])


@AT
def test_a_static_batch_has_max_batch_size_places(make_world, new_request, beside):
    steps = Steps()
    world = make_world(model_type=TrtGptModelType.V1, max_batch_size=3, backend={"on_step": steps})
    world.client.pending = [new_request(i, [i], 2) for i in range(1, 4 + beside)]
    world.run()
    assert max(steps.sequences) == min(3 + beside, 3)
    assert all(world.client.final(i).error == "" for i in range(1, 4 + beside))


def test_nothing_that_was_made_waits_to_be_taken(make_world, new_request):
    """A streaming request gets each token in the iteration that generates it, and the engine drops the sent output.

    Output does not accumulate in the engine, so it has no limit.
    """
    world = make_world()
    world.client.on_send = lambda request_id, response: None
    world.client.pending = [new_request(1, [1], 40, streaming=True)]
    for produced in range(1, 40):
        world.step()
        assert len(world.client.responses[1]) == produced
        delivery = world.loop.deliveries._deliveries[1]
        assert not (delivery.log_probs or delivery.generation_logits) and delivery.num_sent == produced
    world.run()
