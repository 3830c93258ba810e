"""C1 to C6: each item of the get callback is answered exactly once, when its resources are free."""

import pytest

from batch_manager import FinishReason, InferenceRequest, SchedulerPolicy
from batch_manager.errors import InternalError

POLICIES = [SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT]


@pytest.mark.parametrize("policy", POLICIES)
def test_c1_every_accepted_request_gets_exactly_one_final_and_nothing_after_it(make_world, new_request, policy):
    world = make_world(policy=policy, backend={"num_blocks": 12, "tokens_per_block": 4})
    prompts = {i: [i + 1] * (3 + i) for i in range(12)}
    world.client.pending = [new_request(i, prompt, 5 + i % 3, streaming=i % 2 == 0) for i, prompt in prompts.items()]
    world.run()
    for i, prompt in prompts.items():
        expected = world.expected(prompt, 5 + i % 3)
        final = world.client.final(i)
        assert final.error == ""
        assert (world.client.streamed(i) if i % 2 == 0 else final.tokens()[len(prompt):]) == expected


def test_c2_an_item_that_is_refused_gets_one_final_with_a_text_and_no_tensors(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [5, 6], 0), new_request(2, [5, 6], 2)]
    world.run()
    refusal = world.client.final(1)
    assert refusal.tensors == {} and refusal.code == "INVALID_REQUEST" and "request_output_len" in refusal.error
    assert world.client.final(2).error == ""


def test_c2_an_item_without_a_usable_id_is_counted_and_the_loop_goes_on(make_world, new_request):
    world = make_world()
    world.client.pending = ["not a request", None, 17, new_request(3, [5], 1)]
    world.run()
    assert world.loop.intake.unaddressable == 3
    assert list(world.client.responses) == [3]


def test_c2_health_counts_items_without_a_usable_id(make_manager, new_client, new_request):
    client = new_client()
    manager = make_manager(client)
    assert manager.health()["unaddressable_items"] == 0
    client.pending = [None, new_request(3, [5], 1), 17]
    client.wait_for_finals(3)
    assert manager.shutdown()
    assert manager.health()["unaddressable_items"] == 2


def test_c3_a_duplicate_of_a_living_id_is_refused_and_the_living_request_is_untouched(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(7, [1, 2, 3], 4)]
    world.step()
    world.client.pending = [new_request(7, [9, 9], 4), new_request(7, [8], 2)]
    world.run()
    first, second, third = world.client.responses[7]
    assert first.code == second.code == "DUPLICATE_REQUEST_ID" and first.final and second.final
    assert third.tokens() == [1, 2, 3, *world.expected([1, 2, 3], 4)]


def test_c3_the_same_object_handed_over_twice_runs_once(make_world, new_request):
    world = make_world()
    item = new_request(7, [1, 2, 3], 4)
    world.client.pending = [item, item]
    world.run()
    assert sorted(response.code for response in world.client.responses[7]) == ["", "DUPLICATE_REQUEST_ID"]


def test_c3_a_waiting_request_is_alive_too(make_world, new_request):
    world = make_world(max_batch_size=1)
    world.loop.callbacks.fetched._get = lambda n: world.client.pending.pop() if world.client.pending else []
    world.client.pending = [[new_request(1, [4], 2), new_request(2, [5], 2), new_request(2, [6], 2)]]
    world.run()
    assert [response.code for response in world.client.responses[2]] == ["DUPLICATE_REQUEST_ID", ""]


def test_c4_an_id_may_be_handed_over_again_from_inside_its_final_callback(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(7, [1, 2, 3], 4)]

    def hand_over_again(request_id, response):
        if response.final and len(world.client.finals(7)) == 1:
            world.client.pending.append(new_request(7, [4, 4], 3))

    world.client.on_send = hand_over_again
    world.run()
    first, second = world.client.finals(7)
    assert first.tokens() == [1, 2, 3, *world.expected([1, 2, 3], 4)]
    assert second.tokens() == [4, 4, *world.expected([4, 4], 3)]


def test_c5_blocks_slot_and_id_are_free_when_the_final_callback_runs(make_world, new_request):
    world = make_world()
    seen = []

    def look(request_id, response):
        if response.final:
            seen.append((world.loop.kv.used_blocks, len(world.loop.active), request_id in world.loop.active))

    world.client.on_send = look
    for request in (new_request(1, [1] * 9, 3), new_request(2, [2], 3, end_id=5), new_request(3, [1], 1)):
        world.client.pending = [request]
        world.run()
    assert seen == [(0, 0, False)] * 3


def test_c6_a_stop_is_answered_in_its_iteration_with_the_tokens_so_far(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2], 50), new_request(2, [3], 50, streaming=True)]
    world.step(5)
    world.client.stops = {1, 2}
    world.step()
    final = world.client.final(1)
    assert final.error == "" and final.finish_reason == FinishReason.CANCELLED
    assert final.tokens() == [1, 2, *world.expected([1, 2], 6)]
    assert world.client.streamed(2) == world.expected([3], 6)
    assert world.client.final(2).tokens() == []
    assert world.loop.kv.used_blocks == 0


def test_c6_unknown_ids_in_a_stop_are_ignored_and_not_remembered(make_world, new_request):
    world = make_world()
    world.client.stops = {4, 5, 6}
    world.step()
    world.client.stops = set()
    world.client.pending = [new_request(5, [1], 3)]
    world.run()
    assert world.client.final(5).finish_reason == FinishReason.LENGTH


def test_c6_a_natural_end_in_the_iteration_of_the_stop_wins(make_world, new_request):
    world = make_world()
    world.client.stops = {5}
    world.client.pending = [new_request(5, [1], 1)]
    world.run()
    assert world.client.final(5).finish_reason == FinishReason.LENGTH


def test_c6_a_request_that_waits_can_be_stopped(make_world, new_request):
    world = make_world(max_batch_size=1)
    world.loop.callbacks.fetched._get = lambda n: [new_request(1, [4], 9), new_request(2, [5, 6], 9)] if n else []
    world.step()
    world.client.stops = {2}
    world.step()
    final = world.client.final(2)
    assert final.tokens() == [5, 6] and final.finish_reason == FinishReason.CANCELLED and final.error == ""
    assert not world.client.finals(1)


def test_ids_up_to_2_to_the_64_minus_1_are_usable(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(0, [1], 1), new_request(2**64 - 1, [2], 1)]
    world.run()
    assert world.client.final(0).error == world.client.final(2**64 - 1).error == ""


def test_a_request_object_survives_being_mutated_after_it_was_handed_over(make_world):
    world = make_world()
    tensors = {"input_ids": [1, 2, 3], "request_output_len": 3}
    item = InferenceRequest(1, tensors)
    world.client.pending = [item]
    world.step()
    tensors["input_ids"][0] = 9
    item.input_ids = [7]
    world.run()
    assert world.client.final(1).tokens() == [1, 2, 3, *world.expected([1, 2, 3], 3)]


def test_c13_what_a_request_gets_depends_on_the_request_and_its_seed_only(make_world, new_request):
    sampled = {"temperature": 0.7, "runtime_top_k": 5, "random_seed": 3}
    alone = make_world(max_batch_size=1)
    alone.client.pending = [new_request(1, [4, 5, 6], 12, return_log_probs=True, **sampled)]
    alone.run()
    crowd = make_world(backend={"num_blocks": 9, "tokens_per_block": 4}, enable_chunked_context=True, max_num_tokens=16)
    crowd.client.pending = [new_request(i, [4, 5, 6] * i, 12, return_log_probs=True, **sampled) for i in range(1, 6)]
    crowd.run()
    for name in ("output_ids", "output_log_probs"):
        assert (crowd.client.final(1).tensors[name] == alone.client.final(1).tensors[name]).all()


def test_c1_a_second_final_is_a_bug_that_is_noticed_before_it_is_sent(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 2)]
    world.run()
    num_sent = world.loop.unanswered.num_sent
    with pytest.raises(InternalError, match="request 1 would get a second final response"):
        world.loop.callbacks.send_final(1, [])
    assert len(world.client.finals(1)) == 1 and world.loop.unanswered.num_sent == num_sent
