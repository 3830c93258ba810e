"""A request that has tokens at its deadline ends with these tokens. A request without tokens ends with an error."""

import pytest

from batch_manager import FinishReason


def test_a_deadline_that_passes_after_the_first_token_ends_with_the_tokens_so_far(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1, 2], 50, deadline_s=2.0)]
    world.step(3)
    world.clock.now += 2.5
    world.step()
    final = world.client.final(1)
    assert final.finish_reason == FinishReason.TIMED_OUT and final.error == ""
    assert final.tokens() == [1, 2, *world.expected([1, 2], 4)]


def test_a_deadline_that_passes_before_the_first_token_is_an_error(make_world, new_request):
    world = make_world(max_batch_size=1)
    items = [new_request(1, [4], 9), new_request(2, [5], 9, deadline_s=1.0)]
    world.loop.callbacks.fetched._get = lambda n: items if n else []
    world.step()
    world.clock.now += 1.5
    world.step()
    assert world.client.final(2).code == "DEADLINE"
    fact, expectation, way_out = world.client.final(2).error.split("; ")
    assert "deadline_s is 1 and it passed before the first token" in fact and expectation and way_out
    assert not world.client.finals(1)


def test_a_deadline_that_does_not_pass_changes_nothing(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 5, deadline_s=2.0)]
    world.run()
    world.clock.now += 10
    world.step()
    assert world.client.final(1).finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("options, code", [({}, ""), ({"run_ahead": True}, "DEADLINE"),
                                           ({"enable_trt_overlap": True}, "DEADLINE")])
def test_a_deadline_that_passes_during_the_step_of_the_first_token(make_world, new_request, options, code):
    """The step is done when a lockstep engine looks for deadlines, and in flight when another one does."""
    world = make_world(**options)
    world.client.pending = [new_request(1, [1, 2], 9, deadline_s=1.0)]
    start = world.backend.start

    def start_and_wait(*arguments):
        world.clock.now += 1.5
        return start(*arguments)

    world.backend.start = start_and_wait
    world.step(2)
    final = world.client.final(1)
    assert final.code == code
    assert final.code or final.finish_reason == FinishReason.TIMED_OUT
    assert final.code or final.tokens() == [1, 2, *world.expected([1, 2], 1)]
