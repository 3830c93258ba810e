"""Section 3: an iteration makes its calls in the right order, with the right arguments."""

import json

import pytest

from batch_manager import SchedulerPolicy


def test_the_order_of_an_iteration_is_get_send_poll_stats(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 3, streaming=True)]
    world.step()
    assert world.client.events == ["get", "send 1", "poll", "stats"]


def test_the_finals_of_stopped_requests_come_in_the_iteration_of_the_poll_and_before_stats(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 30)]
    world.step(2)
    world.client.events.clear()
    world.client.stops = {1}
    world.step()
    assert world.client.events == ["get", "poll", "send 1", "stats"]


def test_stats_are_not_returned_when_idle_while_get_and_poll_go_on(make_world, new_request):
    world = make_world()
    world.step(3)
    assert world.client.events == ["get", "poll"] * 3


def test_one_more_record_follows_when_the_last_request_has_left_and_it_was_asked_for(make_world, new_request):
    world = make_world(flush_stats_when_idle=True)
    world.client.pending = [new_request(1, [1], 2)]
    world.run()
    world.step(3)
    records = [json.loads(record) for record in world.client.stats]
    assert [record["Active Request Count"] for record in records] == [1, 1, 0]
    assert [record["Used KV cache blocks"] for record in records] == [1, 1, 0]
    assert [record["Iteration Counter"] for record in records] == [0, 1, 2]


def test_get_is_asked_for_the_free_room_every_iteration_also_when_it_is_zero(make_world, new_request):
    world = make_world(max_batch_size=2)
    world.client.pending = [new_request(i, [1], 2) for i in range(3)]
    world.run()
    assert world.client.asked == [2, 0, 2, 1, 2]


def test_the_free_room_follows_max_num_sequences_and_is_minus_one_when_unbounded(make_world, new_request):
    world = make_world(max_batch_size=2, max_num_sequences=5)
    world.step()
    assert world.client.asked == [5]
    world = make_world(max_batch_size=2, max_num_sequences=-1)
    world.client.pending = [new_request(i, [1], 2) for i in range(9)]
    world.run()
    assert set(world.client.asked) == {-1}
    assert all(world.client.final(i).error == "" for i in range(9))


def test_what_exceeds_the_room_waits_in_order_and_beyond_the_bound_is_refused_queue_full(make_world, new_request):
    world = make_world(max_batch_size=1, max_queued_requests=2)
    items = [new_request(i, [1], 1) for i in range(5)]
    world.loop.callbacks.fetched._get = lambda n: [items.pop(0) for _ in range(len(items))]
    world.run()
    order = [event for event in world.client.events if event.startswith("send")]
    assert [world.client.final(i).code for i in range(5)] == ["", "", "", "QUEUE_FULL", "QUEUE_FULL"]
    assert order == ["send 3", "send 4", "send 0", "send 1", "send 2"]


def test_a_streaming_request_gets_a_response_for_each_token_and_the_last_is_final(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2], 4, streaming=True)]
    world.run()
    responses = world.client.responses[1]
    assert [response.final for response in responses] == [False, False, False, True]
    assert [response.tokens() for response in responses] == [[token] for token in world.expected([1, 2], 4)]


def test_a_non_streaming_request_is_answered_once(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2], 4)]
    world.run()
    assert len(world.client.responses[1]) == 1


def test_a_refused_request_gets_its_one_call_in_the_iteration_that_read_it(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [], 4)]
    world.step()
    assert world.client.events == ["get", "send 1", "poll", "stats"]


def test_after_shutdown_was_asked_for_get_is_no_longer_called(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 3)]
    world.step()
    world.client.events.clear()
    world.step(3, accept_new=False)
    assert "get" not in world.client.events and world.client.final(1).error == ""


def test_a_terminate_request_ends_fetching_and_what_is_alive_is_drained(make_world, new_request):
    world = make_world(terminate_req_id=99)
    world.client.pending = [new_request(1, [1], 3), new_request(99, [1], 1), new_request(2, [2], 2)]
    world.step(4)
    asked = len(world.client.asked)
    world.step(2)
    assert world.loop.intake.is_terminating and world.loop.is_empty
    assert len(world.client.asked) == asked == 1
    assert world.client.final(1).error == world.client.final(2).error == "" and 99 not in world.client.responses


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
def test_a_higher_priority_goes_first_and_equal_ones_in_order_of_arrival(make_world, new_request, policy):
    world = make_world(policy=policy, max_batch_size=1, max_num_sequences=4)
    world.client.pending = [new_request(1, [1], 2), new_request(2, [1], 2), new_request(3, [1], 2, priority=0.9),
                            new_request(4, [1], 2, priority=0.9)]
    world.run()
    assert [event for event in world.client.events if event.startswith("send")] == [
        "send 3", "send 4", "send 1", "send 2"]


def test_at_most_4096_items_are_looked_at_in_one_iteration_and_none_is_lost(make_world, new_request):
    world = make_world(max_batch_size=64, max_queued_requests=10)
    items = [new_request(i, [1], 1) for i in range(10_000)]
    world.loop.callbacks.fetched._get = lambda n: [items.pop(0) for _ in range(len(items))]
    world.step()
    assert world.loop.intake.num_accepted + world.loop.intake.num_refused == 4096
    world.run()
    assert sorted(world.client.responses) == list(range(10_000))
    assert all(len(responses) == 1 and responses[0].final for responses in world.client.responses.values())


@pytest.mark.parametrize("empty", [list, tuple, set, lambda: iter(()), lambda: None])
def test_an_answer_without_items_is_nothing_to_do_whatever_its_type(make_world, empty):
    world = make_world()
    world.loop.callbacks.fetched._get = lambda n: empty()
    assert not world.step()
    assert world.loop.is_empty


def test_an_endless_generator_is_cut_at_the_cap(make_world, new_request):
    world = make_world(max_batch_size=4, max_queued_requests=4, max_admissions_per_iteration=50)

    def endless():
        number = 0
        while True:
            yield new_request(number, [1], 1)
            number += 1

    sources = [endless()]
    world.loop.callbacks.fetched._get = lambda n: sources.pop() if sources else []
    world.run()
    assert sorted(world.client.responses) == list(range(50))
