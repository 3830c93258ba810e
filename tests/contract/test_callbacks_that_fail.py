"""C15: whatever a callback raises stays in its guard."""

import json
import logging

import pytest

RAISED = [ValueError("secret prompt"), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError()]


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_c15_a_raising_get_counts_as_empty_and_is_asked_again_after_a_back_off(make_world, new_request, error):
    world = make_world()
    world.client.pending = [new_request(1, [1], 4)]
    world.step()

    def raising(n):
        world.client.events.append("get")
        raise error

    world.loop.callbacks._get = raising
    world.client.events.clear()
    world.step(3)
    assert world.client.events.count("get") == 1, "no time has passed, so the back-off still holds"
    assert world.client.final(1).error == ""
    calls = []
    for _ in range(30):
        world.client.events.clear()
        world.clock.now += 0.1
        world.step()
        calls.append(world.client.events.count("get"))
    assert calls == [1] * 30, "the back-off is never longer than 100 ms"
    assert world.loop.callbacks.failures["get"] == 31


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_c15_items_an_iterator_gave_before_it_raised_stand(make_world, new_request, error):
    world = make_world()

    def breaks_midway():
        yield new_request(1, [1], 2)
        yield new_request(2, [2], 2)
        raise error

    sources = [breaks_midway()]
    world.loop.callbacks._get = lambda n: sources.pop() if sources else []
    world.run()
    assert world.client.final(1).error == world.client.final(2).error == ""
    assert world.loop.callbacks.failures["get"] == 1


@pytest.mark.parametrize("junk", [5, object(), 1.5, True])
def test_c15_what_is_not_iterable_counts_as_a_failure_and_none_as_nothing(make_world, junk):
    world = make_world()
    returned = [None, junk]
    world.loop.callbacks._get = lambda n: returned.pop(0)
    world.step()
    assert world.loop.callbacks.failures["get"] == 0
    world.step()
    assert world.loop.callbacks.failures["get"] == 1


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("on_final", [False, True])
def test_c15_a_raising_send_counts_as_delivered_and_is_never_repeated(make_world, new_request, error, on_final):
    world = make_world()
    world.client.pending = [new_request(1, [1], 3, streaming=True), new_request(2, [2], 3)]

    def raising(request_id, response):
        if response.final == on_final:
            raise error

    world.client.on_send = raising
    world.run()
    assert world.client.streamed(1) == world.expected([1], 3)
    assert len(world.client.finals(1)) == len(world.client.finals(2)) == 1
    assert world.loop.callbacks.failures["send"] == 2


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_c15_a_raising_poll_counts_as_an_empty_set(make_world, new_request, error):
    world = make_world()

    def raising():
        raise error

    world.loop.callbacks._poll = raising
    world.client.pending = [new_request(1, [1], 3)]
    world.run()
    assert world.client.final(1).finish_reason == 3


def test_c15_what_is_no_integer_in_a_poll_is_skipped(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 9)]
    world.step()
    world.client.stops = ["x", None, 1.0, (1,), True, 1]
    world.step()
    assert world.client.final(1).finish_reason == 5


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_c15_a_raising_stats_callback_is_ignored(make_world, new_request, error):
    world = make_world()

    def raising(record):
        raise error

    world.loop.callbacks._stats = raising
    world.client.pending = [new_request(1, [1], 3)]
    world.run()
    assert world.client.final(1).error == ""
    assert world.loop.callbacks.failures["stats"] == 3


def test_c15_failures_are_logged_at_most_once_a_second_and_without_the_message(make_world, new_request, caplog):
    world = make_world()

    def raising(request_id, response):
        raise ValueError("sec" + "ret")

    world.client.on_send = raising
    world.client.pending = [new_request(1, [1], 5, streaming=True)]
    with caplog.at_level(logging.ERROR, "batch_manager"):
        world.run()
    assert len(caplog.records) == 1
    assert "ValueError" in caplog.text and "secret" not in caplog.text


def test_c15_failures_are_counted_in_the_statistics(make_world, new_request):
    world = make_world()

    def raising(request_id, response):
        raise ValueError

    world.client.on_send = raising
    world.client.pending = [new_request(1, [1], 3, streaming=True)]
    world.run()
    assert json.loads(world.client.stats[-1])["Failed send Callbacks"] == 3


def test_a_callback_may_keep_and_change_the_tensors_it_got(make_world, new_request):
    world = make_world()

    def scribble(request_id, response):
        for tensor in response.tensors.values():
            tensor[...] = 77

    world.client.on_send = scribble
    world.client.pending = [new_request(1, [1, 2], 5, streaming=True), new_request(2, [1, 2], 5)]
    kept = []
    world.loop.callbacks._send = lambda i, tensors, final, error: (
        kept.append((i, [[int(x) for x in t.tensor.reshape(-1)] for t in tensors][0])),
        [t.tensor.fill_(77) for t in tensors])
    world.run()
    expected = world.expected([1, 2], 5)
    assert [tokens[0] for i, tokens in kept if i == 1] == expected
    assert [tokens for i, tokens in kept if i == 2] == [[1, 2, *expected]]
