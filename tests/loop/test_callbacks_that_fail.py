"""C15: an exception of a callback is contained in its guarded block."""

import json
import logging
from collections import UserList, deque
from itertools import count, islice
from types import SimpleNamespace

import pytest

from batch_manager import FinishReason
from batch_manager.clock import reliable
from batch_manager.errors import ManagerClosedError
from batch_manager.loop import fetched_items

RAISED = [ValueError("secret prompt"), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError()]


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_c15_a_raising_get_counts_as_empty_and_is_asked_again_after_a_back_off(make_world, new_request, error):
    world = make_world()
    world.client.pending = [new_request(1, [1], 4)]
    world.step()

    def raising(n):
        world.client.events.append("get")
        raise error

    world.loop.callbacks.fetched._get = raising
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
    world.loop.callbacks.fetched._get = lambda n: sources.pop() if sources else []
    world.run()
    assert world.client.final(1).error == world.client.final(2).error == ""
    assert world.loop.callbacks.failures["get"] == 1


@pytest.mark.parametrize("junk", [5, object(), 1.5, True])
def test_c15_what_is_not_iterable_counts_as_a_failure_and_none_as_nothing(make_world, junk):
    world = make_world()
    returned = [None, junk]
    world.loop.callbacks.fetched._get = lambda n: returned.pop(0)
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


class OddTraceback(Exception):
    __traceback__ = property(lambda self: 1 / 0)


class OddClass(Exception):
    __class__ = property(lambda self: 1 / 0)


class OddNames(type):
    __name__ = property(lambda cls: 1 / 0)
    __mro__ = property(lambda cls: 1 / 0)


class OddMeta(Exception, metaclass=OddNames):
    pass


@pytest.mark.parametrize("odd", [OddTraceback, OddClass, OddMeta], ids=["traceback", "class", "names"])
@pytest.mark.parametrize("place", ["get", "send", "poll", "stats", "trace", "clock", "step"])
def test_c15_c21_an_exception_of_an_odd_class_costs_no_more_than_another(make_world, new_request, odd, place):
    raised = []

    def raising(*_):
        raised.append(place)
        raise odd

    def first_step(batch):
        if not raised:
            raising()

    parts = {"trace": raising} if place == "trace" else {}
    world = make_world(parts=parts, backend={"on_step": first_step} if place == "step" else None)
    world.client.pending = [new_request(1, [1], 3), new_request(2, [2], 3)]
    if place == "clock":
        world.loop.callbacks.guard.monotonic = reliable(SimpleNamespace(monotonic=raising)).monotonic
    elif place in ("get", "send", "poll", "stats"):
        world.step()
        owner = world.loop.callbacks.fetched if place == "get" else world.loop.callbacks
        setattr(owner, f"_{place}", raising)
    for _ in range(8):
        world.step()
    assert raised and world.loop.failure is None
    if place != "send":
        assert world.client.final(1).error == world.client.final(2).error == ""


def test_c6_one_signal_that_cannot_be_read_does_not_hide_the_others(make_world, new_request):
    class Odd:
        def __index__(self):
            raise SystemExit

    world = make_world()
    world.client.pending = [new_request(1, [1], 30)]
    world.step(2)
    world.client.stops = [OddClass(), Odd(), "1", 1.0, True, 1]
    world.step()
    assert world.client.final(1).finish_reason == FinishReason.CANCELLED


@pytest.mark.parametrize("form", [list, tuple, iter, deque, lambda items: iter(tuple(items)),
                                  lambda items: dict.fromkeys(items)],
                         ids=["list", "tuple", "iterator over a list", "deque", "iterator over a tuple", "dict"])
def test_c2_c20_what_one_iteration_does_not_read_waits_for_the_next(make_world, new_request, form):
    world = make_world(max_admissions_per_iteration=3, max_num_sequences=-1)
    sources = [form([new_request(i, [1], 1) for i in range(10)])]
    world.loop.callbacks.fetched._get = lambda count: sources.pop() if sources else []
    world.run()
    assert all(world.client.final(i).error == "" for i in range(10))


def test_c2_a_list_that_its_owner_empties_and_returns_again_loses_nothing(make_world, new_request):
    world = make_world(max_admissions_per_iteration=3, max_num_sequences=-1)
    ids, handed_over = iter(range(20)), []

    def get(count):
        handed_over[:] = [new_request(i, [1], 1) for i in islice(ids, 10)]
        return handed_over

    world.loop.callbacks.fetched._get = get
    world.run()
    assert all(world.client.final(i).error == "" for i in range(20))


class OwnList(list):
    pass


class OwnDeque(deque):
    pass


def answered_meanwhile(make_world, make_collection):
    """Return (the ids of the answered requests, the size of the collection at the end).

    The get callback returns a collection of ten requests, and an iteration reads four of them. When a request is
    answered, the client removes it from the collection.

    make_collection   function that returns (collection, result of get, function that removes the request of an id)
    """
    world = make_world(max_admissions_per_iteration=4, max_num_sequences=-1)
    handed_over, given, take_out = make_collection()
    calls = [given]
    world.loop.callbacks.fetched._get = lambda count: calls.pop() if calls else []
    send = world.loop.callbacks._send

    def sending(request_id, tensors, final, error):
        send(request_id, tensors, final, error)
        if final:
            take_out(request_id)

    world.loop.callbacks._send = sending
    world.run()
    return sorted(world.client.responses), len(handed_over)


@pytest.mark.parametrize("kind", [list, deque, OwnList, OwnDeque])
@pytest.mark.parametrize("give", [lambda items: items, iter], ids=["itself", "iterator"])
def test_c2_what_its_owner_empties_while_it_is_read_loses_nothing(make_world, new_request, kind, give):
    def make():
        items = kind(new_request(i, [1], 1) for i in range(10))
        return items, give(items), lambda i: items.remove(next(item for item in items if item.request_id == i))
    assert answered_meanwhile(make_world, make) == (list(range(10)), 0)


@pytest.mark.parametrize("view", [dict.values, dict.items, lambda table: table.values().__iter__()],
                         ids=["values", "items", "iterator"])
def test_c2_a_view_of_a_table_whose_entries_are_taken_out_loses_nothing(make_world, new_request, view):
    def make():
        table = {i: new_request(i, [1], 1) for i in range(10)}
        return table, view(table), table.pop
    answered, left = answered_meanwhile(make_world, make)
    assert (answered, left) == ((list(range(10)), 0) if view is not dict.items else ([], 10))    # pairs are no requests


@pytest.mark.parametrize(("size", "num_items", "num_read"), [
    (None, 10, 4), (3, 10, 5), (4, 10, 5), (6, 10, 7), (3, 4, 4), (6, 6, 6), (9, 6, 6)])
def test_c20_what_is_dropped_of_an_iterable_is_logged(make_world, new_request, caplog, size, num_items, num_read):
    """A generator, or an object whose size is wrong: what is not answered has a warning, and nothing else has one."""
    world = make_world(max_admissions_per_iteration=4, max_num_sequences=-1)
    items = [new_request(i, [1], 1) for i in range(num_items)]
    sources = [iter(item for item in items) if size is None else Odd(items, lambda: size)]
    world.loop.callbacks.fetched._get = lambda count: sources.pop() if sources else []
    world.run()
    assert sorted(world.client.responses) == list(range(num_read))
    assert (f"the first {num_read} items were read" in caplog.text) == (num_read < num_items)


class Odd(UserList):
    """A list of ten requests whose length and iterator are replaced."""

    def __init__(self, items, length, iterate=None):
        super().__init__(items)
        self.length, self.iterate = length, iterate

    def __len__(self):
        return self.length()

    def __iter__(self):
        return self.iterate() if self.iterate else iter(self.data)


def endless(make, raises_at=None):
    for number in count():
        if number == raises_at:
            raise KeyError("secret prompt")
        yield make(number)


def indexed(items):
    return type("Indexed", (), {"__getitem__": lambda self, place: items[place]})()


# what get returns, given ten requests and a function that makes one: (object, number of requests answered, failures)
ODD_RETURNS = {
    "an endless generator": lambda items, make: (endless(make), 4, 0),
    "a generator that raises": lambda items, make: (endless(make, 3), 3, 1),
    "a list whose iterator is endless": lambda items, make: (Odd(items, lambda: 6, lambda: endless(make)), 7, 0),
    "endless with an endless length": lambda items, make: (Odd(items, lambda: 2**60, lambda: endless(make)), 12, 0),
    "a length that is too large": lambda items, make: (Odd(items, lambda: 11), 10, 0),
    "a length that is too small": lambda items, make: (Odd(items, lambda: 1), 5, 0),
    "a length that raises": lambda items, make: (Odd(items, lambda: 1 / 0), 4, 1),
    "a negative length": lambda items, make: (Odd(items, lambda: -1), 4, 1),
    "a list that raises in the middle": lambda items, make: (Odd(items, lambda: 10, lambda: endless(make, 7)), 7, 1),
    "an iterator that raises at once": lambda items, make: (Odd(items, lambda: 10, lambda: 1 / 0), 0, 1),
    "what has places only": lambda items, make: (indexed(items), 4, 0),
    "an iterator over a list": lambda items, make: (iter(items), 10, 0),
}


@pytest.mark.parametrize("how", ODD_RETURNS)
def test_c2_c15_every_item_that_an_odd_iterable_hands_over_is_answered(make_world, new_request, monkeypatch, how):
    monkeypatch.setattr(fetched_items, "MOST_ITEMS", 12)
    world = make_world(max_admissions_per_iteration=4, max_num_sequences=-1)
    make = lambda number: new_request(number, [1], 1)
    given, num_answered, num_failures = ODD_RETURNS[how]([make(number) for number in range(10)], make)
    sources = [[make(99)], given]
    world.loop.callbacks.fetched._get = lambda n: sources.pop() if sources else []
    for _ in range(8):
        world.step()
        world.clock.now += 0.1    # no back-off lasts longer
    assert sorted(world.client.responses) == [*range(num_answered), 99]
    assert all(world.client.final(i).error == "" for i in world.client.responses)
    assert world.loop.callbacks.failures["get"] == num_failures


@pytest.mark.parametrize("kind", [list, deque, UserList])
def test_c2_c14_what_is_put_into_a_returned_collection_later_is_not_read(make_world, new_request, kind):
    world = make_world(max_admissions_per_iteration=2)
    items = kind(new_request(i, [1], 9) for i in range(6))
    world.client.on_send = lambda request_id, response: items.append(new_request(len(items), [1], 9))
    sources = [items]
    world.loop.callbacks.fetched._get = lambda n: sources.pop() if sources else []
    world.step()
    world.loop.answer_the_rest(ManagerClosedError("the end"))
    assert world.loop.is_empty and len(items) == 12
    assert {i: world.client.final(i).code for i in world.client.responses} == dict.fromkeys(range(6), "SHUTDOWN")


def memory(gpu):
    return SimpleNamespace(gpu=gpu, cpu=0, pinned=0)


@pytest.mark.parametrize("said", [RuntimeError("x"), None, memory(0.5), memory(2**64), memory(-1)],
                         ids=["raises", "None", "a float", "too many bytes", "negative"])
def test_c15_a_memory_number_that_is_none_costs_nobody_anything(make_world, new_request, said):
    world = make_world()

    def memory_usage():
        if isinstance(said, Exception):
            raise said
        return said

    world.backend.memory_usage = memory_usage
    world.client.pending = [new_request(1, [1], 3)]
    world.run()
    assert world.client.final(1).error == "" and world.loop.failure is None
    assert json.loads(world.client.stats[0])["Runtime GPU Memory Usage"] == 0
    assert world.loop.callbacks.failures["memory_usage"] > 0


def test_c26_requests_that_are_cut_to_length_are_all_counted_and_logged_once_a_second(make_world, new_request, caplog):
    world = make_world(max_seq_len=8)
    world.client.pending = [new_request(i, [1, 2], 100) for i in range(5)]
    with caplog.at_level(logging.WARNING, "batch_manager"):
        world.run()
    assert len(caplog.records) == 1
    assert json.loads(world.client.stats[-1])["Clamped Requests"] == 5


def test_c20_get_is_not_asked_for_more_while_what_it_gave_is_unread(make_world, new_request):
    world = make_world(max_admissions_per_iteration=3, max_num_sequences=-1)
    ids, calls = iter(range(10**6)), []

    def get(count):
        calls.append(count)
        return [new_request(i, [1], 1) for i in islice(ids, 10)]

    world.loop.callbacks.fetched._get = get
    world.step(40)
    assert 40 / 5 <= len(calls) <= 40 / 3, "ten are read in four iterations"
    assert len(world.client.responses) == 10 * len(calls)
