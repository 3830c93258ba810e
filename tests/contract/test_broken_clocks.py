"""C1, C15: a user's clock that fails loses no response."""

import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from batch_manager import FinishReason, build, gpt_manager
from batch_manager import clock as clocks


def raising() -> float:
    raise RuntimeError("stopped")


def leaving() -> float:
    sys.exit(3)


def interrupted() -> float:
    raise KeyboardInterrupt


def nan() -> float:
    return float("nan")


def nothing() -> None:
    pass


def far_away() -> float:
    return 1e30


BROKEN_CLOCKS = [far_away, raising, leaving, interrupted, nan, nothing]


@pytest.mark.parametrize("broken", BROKEN_CLOCKS, ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("good_times", [1, 9, 40])
def test_c1_c15_a_clock_that_fails_for_ever_costs_no_response(make_manager, new_client, new_request, broken,
                                                                good_times):
    times = iter(range(good_times))
    clock = SimpleNamespace(timestamp=lambda: "now", monotonic=lambda: broken() if next(times, None) is None
                            else time.monotonic())
    client = new_client()
    client.pending = [new_request(1, [1], 3), new_request(2, [1, 2], 9, deadline_s=60.0), new_request(3, [-1], 3)]
    manager = make_manager(client, parts={"clock": clock})
    client.wait_for_finals(1, 2, 3)
    wanted = {1: {""}, 2: {""}, 3: {"INVALID_REQUEST"}}
    assert all(client.final(request_id).code in codes for request_id, codes in wanted.items())
    assert manager.health()["seconds_in_activity"] >= 0
    assert manager.shutdown()


def test_c6_a_deadline_is_kept_by_a_clock_that_has_failed(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(1, [1], 900, deadline_s=0.05)]
    manager = make_manager(client, parts={"clock": SimpleNamespace(timestamp=lambda: "now", monotonic=raising)},
                           backend={"on_step": lambda batch: time.sleep(0.002)})
    client.wait_for_finals(1)
    assert client.final(1).finish_reason == FinishReason.TIMED_OUT and manager.shutdown()


def test_a_clock_that_is_believed_whatever_it_does_loses_responses(make_manager, new_client, new_request, monkeypatch):
    """If the wrapper `reliable` is removed, a failing clock loses a final response.

    This shows that the other tests of this file notice a lost response.
    """
    for module in (build, gpt_manager):
        monkeypatch.setattr(module, "reliable", lambda clock: clock)
    has_begun, client = threading.Event(), new_client()

    def monotonic() -> float:
        if has_begun.is_set():
            raising()
        return time.monotonic()
    client.pending = [new_request(1, [1], 900)]
    manager = make_manager(client, parts={"clock": SimpleNamespace(timestamp=lambda: "now", monotonic=monotonic)},
                           backend={"on_step": lambda batch: has_begun.set()})
    assert has_begun.wait(20) and manager.shutdown(drain=False)
    assert not client.finals(1)


@pytest.mark.parametrize("said", [None, 5, b"x", "\ud800", [1], RuntimeError("x"), SystemExit(1)], ids=repr)
def test_c1_c15_a_timestamp_that_is_no_text_is_the_systems(make_world, new_request, said):
    def timestamp():
        if isinstance(said, BaseException):
            raise said
        return said

    world = make_world()
    world.loop.clock = clocks.reliable(SimpleNamespace(timestamp=timestamp, monotonic=time.monotonic))
    world.client.pending = [new_request(1, [1], 3)]
    world.run()
    assert world.client.final(1).error == ""
    assert re.fullmatch(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d", json.loads(world.client.stats[0])["Timestamp"])


def test_c15_a_clock_that_is_set_back_does_not_keep_get_from_being_called(make_world, new_request):
    world = make_world()
    get = world.loop.callbacks.fetched._get

    def raises_once(count):
        world.loop.callbacks.fetched._get = get
        raise RuntimeError

    world.loop.callbacks.fetched._get = raises_once
    world.step()
    world.clock.now -= 900.0
    world.client.pending = [new_request(1, [1], 2)]
    world.step(4)
    assert world.client.final(1).error == ""
