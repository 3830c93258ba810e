"""C2, C3, C15, C16: unusual callbacks, through a manager with its thread."""

import functools
import itertools
import logging
import threading
import time

import numpy as np
import pytest

from batch_manager import ConfigError, InferenceRequest


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


def once(value):
    """Return a get callback that returns `value` once, then empty lists."""
    values = [value]
    return lambda max_num_requests: values.pop() if values else []


class Breaks:
    """An iterator that raises `error` after its items."""

    def __init__(self, items, error):
        self.items, self.error = list(items), error

    def __iter__(self):
        return self

    def __next__(self):
        if not self.items:
            raise self.error
        return self.items.pop(0)


class Indexed:
    """An object that can be iterated by __getitem__ only."""

    def __init__(self, items):
        self.items = items

    def __getitem__(self, i):
        return self.items[i]


class Grows(list):
    def __iter__(self):
        for item in list.__iter__(self):
            self.append(None)
            yield item
            self.pop()


class NoHash(Exception):
    __hash__ = None


class Mute(Exception):
    def __str__(self):
        raise SystemExit

    __repr__ = __str__


class NamelessKind(type):
    @property
    def __name__(cls):
        raise ValueError("no name")


class Nameless(Exception, metaclass=NamelessKind):
    pass


ODD_ERRORS = [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), RecursionError(), StopAsyncIteration(), NoHash(),
              Mute(), Nameless()]
TWO = {
    "a dictionary": lambda items: dict.fromkeys(items),
    "an array of objects": lambda items: np.array(items, dtype=object),
    "a map": lambda items: map(lambda item: item, items),
    "an object with __getitem__ alone": Indexed,
    "a list that changes while it is read": Grows,
}


@pytest.mark.parametrize("form", TWO.values(), ids=TWO)
def test_c2_whatever_can_be_iterated_over_is_handed_over(make_manager, new_client, new_request, form):
    client = new_client()
    client.get = once(form([new_request(1, [1], 3), new_request(2, [2], 3)]))
    make_manager(client)
    client.wait_for_finals(1, 2)
    assert client.final(1).error == client.final(2).error == ""


@pytest.mark.parametrize("error", ODD_ERRORS, ids=lambda error: type.__dict__["__name__"].__get__(type(error)))
def test_c15_an_iterator_and_every_callback_may_raise_anything(make_manager, new_client, new_request, error):
    client = new_client()

    def raising(*arguments):
        raise error

    client.get = once(Breaks([new_request(1, [1], 3), new_request(2, [2], 3)], error))
    client.on_send, client.poll, client.return_stats = raising, raising, raising
    manager = make_manager(client)
    client.wait_for_finals(1, 2)
    assert client.final(1).error == client.final(2).error == ""
    wait_until(lambda: all(manager.health()["callback_failures"].values()))
    assert manager.health()["state"] == "RUNNING"


@pytest.mark.parametrize("value", ["text", b"bytes", 7, np.arange(3), object(), [None, [1], "x", Nameless("x")]],
                         ids=lambda value: type(value).__name__)
def test_c2_what_holds_no_request_is_counted_or_a_failure_and_the_next_call_is_as_ever(
        make_manager, new_client, new_request, value):
    """After get has returned an object without a usable request, a request of its next call runs as usual."""
    client = new_client()
    values = [[new_request(1, [1], 3)], value]
    client.get = lambda max_num_requests: values.pop() if values else []
    manager = make_manager(client)
    client.wait_for_finals(1)
    assert client.final(1).error == ""
    assert manager.health()["state"] == "RUNNING"


def test_c2_c26_items_without_an_id_are_logged_at_most_once_a_second_and_on_one_line(
        make_manager, new_client, new_request, caplog):
    client = new_client()
    forged = type("x\nCRITICAL forged", (), {})
    client.get = once([forged() for _ in range(500)] + [new_request(1, [1], 3)])
    with caplog.at_level(logging.ERROR, "batch_manager"):
        make_manager(client)
        client.wait_for_finals(1)
    records = [record for record in caplog.records if "without a usable request id" in record.getMessage()]
    assert 1 <= len(records) <= 3
    assert all("\n" not in record.getMessage() for record in records)


def test_c3_a_request_whose_id_changes_when_it_is_read_again_is_refused_and_hurts_nobody(
        make_manager, new_client, new_request):
    ids = itertools.cycle([1, 2])

    class Fickle(InferenceRequest):
        request_id = property(lambda self: next(ids))

    client = new_client()
    client.get = once([new_request(2, [2], 30), Fickle(1, {"input_ids": [1], "request_output_len": 3})])
    manager = make_manager(client)
    client.wait_for_finals(1, 2)
    assert client.final(1).code == "INVALID_REQUEST" and client.final(2).error == ""
    assert manager.health()["state"] == "RUNNING"


async def an_async_function(*arguments):
    return []


class AsyncObject:
    async def __call__(self, *arguments):
        return []


def a_generator_function(*arguments):
    yield


NEVER_RUN = {"async def": an_async_function, "an async method": AsyncObject(),
             "a partial of async def": functools.partial(an_async_function, 1)}


@pytest.mark.parametrize("name", ["get", "send", "poll", "return_stats"])
@pytest.mark.parametrize("callback", [*NEVER_RUN.values(), a_generator_function], ids=[*NEVER_RUN, "a generator"])
def test_a_callback_that_returns_before_it_has_run_is_refused_and_nothing_is_lost_in_silence(
        make_manager, new_client, new_request, name, callback):
    """An async function is refused as any callback, and a generator function as any callback except get and poll."""
    client = new_client()
    setattr(client, name, callback)
    if callback is a_generator_function and name in ("get", "poll"):    # generators are valid results of get and poll
        assert make_manager(client).shutdown(timeout=20)
        return
    with pytest.raises(ConfigError, match="_cb is an async or a generator function"):
        make_manager(client)


class OddInteger:
    def __init__(self, error_or_value):
        self.given = error_or_value

    def __index__(self):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


STOPS = {
    "an array": lambda: np.array([1, 2]),
    "numpy integers": lambda: {np.uint64(1), np.int8(2)},
    "a generator": lambda: (request_id for request_id in (1, 2)),
    "an endless generator": lambda: itertools.cycle([1, 2]),
    "keys": lambda: {1: "a", 2: "b"}.keys(),
    "strange integers among them": lambda: [OddInteger(ValueError()), OddInteger("x"), OddInteger(1), -1, 2**70, True,
                                            float("nan"), None, [], 2],
    "a hundred thousand": lambda: set(range(100_000)),
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_c6_c15_ids_to_stop_may_come_in_any_form_and_what_is_no_integer_is_skipped(
        make_manager, new_client, new_request, stops):
    client = new_client()
    client.pending = [new_request(i, [1], 9) for i in (1, 2, 200_000)]
    given = once(stops())
    client.poll = lambda: given(0)
    manager = make_manager(client)
    client.wait_for_finals(1, 2, 200_000)
    assert client.final(1).finish_reason == client.final(2).finish_reason == 5
    assert client.final(1).error == "" and client.final(200_000).finish_reason == 3
    assert manager.health()["callback_failures"]["poll"] == 0


def test_c15_a_set_to_stop_may_be_added_to_while_it_is_read(make_manager, new_client, new_request):
    client = new_client()
    manager, ended = make_manager(client), threading.Event()

    def add():
        for number in itertools.count(1000):
            if ended.is_set():
                break
            client.stops.add(number)
            if number % 2_000 == 0:
                client.stops.clear()

    adding = threading.Thread(target=add)
    adding.start()
    client.pending = [new_request(1, [1], 50)]
    client.wait_for_finals(1)
    ended.set()
    adding.join(60)
    assert manager.health()["callback_failures"]["poll"] == 0


def test_c16_a_callback_may_do_anything_with_the_manager_and_make_another_one(make_manager, new_client, new_request):
    client, inner_client = new_client(), new_client()
    inner_client.pending = [new_request(7, [7], 3)]
    managers, answers = [], []

    def on_send(request_id, response):
        if len(managers) == 1:
            manager = managers[0]
            manager.notify()
            with manager:    # its exit requests a shutdown from inside a callback
                answers.append((manager.num_active_requests, manager.health()["activity"]))
            answers.append((manager.shutdown(timeout=0), manager.wait_until_terminate(5)))
            managers.append(make_manager(inner_client))
            with managers[1]:
                inner_client.wait_for_finals(7)

    client.on_send = on_send
    managers.append(make_manager(client))
    client.pending.append(new_request(1, [1], 20, streaming=True))
    client.wait_for_finals(1)
    assert managers[0].shutdown()
    assert answers == [(1, "send"), (False, False)]
    assert len(client.streamed(1)) == 20 or client.final(1).code == "SHUTDOWN"
    assert managers[1].shutdown(), "inside a callback of another one it only asked"
    assert inner_client.final(7).error == ""
