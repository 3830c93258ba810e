"""A scheduler's plan runs, or an error names the scheduler's class and the broken rule. The engine goes on."""

from collections import deque
from itertools import chain, count, repeat

import numpy as np
import pytest

from batch_manager import CapacityScheduler, RequestScheduler, SchedulerOutput
from batch_manager.errors import SchedulerContractError

PROMPTS = {1: [5, 6, 7], 2: [8, 9]}


def split(active):
    return [request for request in active if request.is_context], [r for r in active if r.is_generating]


class Planned(RequestScheduler):
    """A scheduler that returns plan(context requests, generation requests)."""

    def __init__(self, plan):
        self.plan = plan

    def schedule_request(self, active_requests, inflight_request_ids):
        return self.plan(*split(active_requests))


def in_(container):
    return lambda contexts, generation: SchedulerOutput(container(contexts), container(generation), container([]))


class IteratesOnce(list):
    def __iter__(self):
        self.asked = getattr(self, "asked", 0) + 1
        return super().__iter__() if self.asked == 1 else iter(())


class OutputOfOnesOwn(SchedulerOutput):
    """A plan whose fields can be read only once."""

    def __getattribute__(self, name):
        if name.startswith("_"):
            return super().__getattribute__(name)
        asked = super().__getattribute__("paused_requests")
        assert name not in asked
        asked.append(name)
        return {"paused_requests": []}.get(name, super().__getattribute__(name))


def as_objects(requests):
    array = np.empty(len(requests), object)
    array[:] = requests
    return array


def run(make_world, new_request, scheduler):
    world = make_world(parts={"scheduler": scheduler})
    world.client.pending = [new_request(i, prompt, 6) for i, prompt in PROMPTS.items()]
    world.run()
    return world


CONTAINERS = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "dict": dict.fromkeys, "array": as_objects,
    "keys": lambda requests: dict.fromkeys(requests).keys(),
    "values": lambda requests: {request.request_id: request for request in requests}.values(),
    "generator": lambda requests: (request for request in requests), "a list that iterates once": IteratesOnce,
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_requests_may_come_in_whatever_can_be_iterated(make_world, new_request, container):
    world = run(make_world, new_request, Planned(in_(container)))
    for i, prompt in PROMPTS.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 6)


@pytest.mark.parametrize("paused", [lambda: (r for r in ()), lambda: filter(None, []), lambda: iter([]), set],
                         ids=["generator", "filter", "iterator", "set"])
def test_a_capacity_scheduler_may_answer_with_iterators(make_world, new_request, paused):
    class Lazy(CapacityScheduler):
        def schedule_request(self, active_requests):
            return iter(active_requests), paused()

    world = run(make_world, new_request, Lazy())
    assert all(world.client.final(i).error == "" for i in PROMPTS)


def test_an_iterator_of_requests_to_pause_pauses_them(make_world, new_request):
    def pauses_the_second_once(contexts, generation):
        second = [request for request in generation if request.request_id == 2 and not request.num_pauses]
        return SchedulerOutput(contexts, [r for r in generation if r not in second], iter(second))

    world = run(make_world, new_request, Planned(pauses_the_second_once))
    assert '"Paused Requests":1' in "".join(world.client.stats)
    for i, prompt in PROMPTS.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 6)


def test_a_plan_of_ones_own_class_is_asked_once(make_world, new_request):
    world = run(make_world, new_request, Planned(lambda *lists: OutputOfOnesOwn(*lists)))
    assert all(world.client.final(i).error == "" for i in PROMPTS)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_chunk_sizes_may_be_narrow_integers(make_world, new_request, dtype):
    """Chunk sizes of any integer dtype are valid. The sum of two chunk sizes overflows int8."""
    def in_chunks_of_64(contexts, generation):
        sizes = np.array([min(request.remaining_context, 64) for request in contexts], dtype)
        return SchedulerOutput(contexts, generation, [], sizes)

    world = make_world(parts={"scheduler": Planned(in_chunks_of_64)}, enable_chunked_context=True)
    world.client.pending = [new_request(i, [i] * 300, 3) for i in (1, 2)]
    world.run()
    assert all(world.client.final(i).tokens() == [i] * 300 + world.expected([i] * 300, 3) for i in (1, 2))


def after_the_contexts(**odd):
    return lambda contexts, generation: SchedulerOutput(contexts, generation, **({} if contexts else odd))


BROKEN = {
    "sizes left over": (after_the_contexts(chunk_sizes=[4]), "1 chunk size for 0 context requests"),
    "a size": (after_the_contexts(chunk_sizes=5), "reading its plan raised"),
    "a text of sizes": (after_the_contexts(chunk_sizes="ab"), "for 0 context requests"),
    "sizes without end": (lambda c, g: SchedulerOutput(c, g, [], repeat(1)), "chunk sizes for"),
    "a request for ever": (lambda c, g: SchedulerOutput(repeat(c[0]), g), "is in the plan twice"),
    "integers without end": (lambda c, g: SchedulerOutput(c, g, count()), "int is not active"),
    "a request too many": (lambda c, g: SchedulerOutput(chain(c, [object()]), g), "object is not active"),
    "nothing that iterates": (lambda c, g: SchedulerOutput(c, g, 5), "reading its plan raised"),
}


@pytest.mark.parametrize(("plan", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_plan_that_cannot_be_carried_out_is_named_and_costs_the_active_requests_only(make_world, new_request, plan,
                                                                                     rule):
    scheduler = Planned(plan)
    world = run(make_world, new_request, scheduler)
    for i in PROMPTS:
        text = world.client.final(i).error
        assert text.startswith("[ENGINE_FAILED]") and rule in text and "Planned broke the scheduler contract" in text
    scheduler.plan = SchedulerOutput
    world.client.pending = [new_request(3, [4], 2)]
    world.run()
    assert world.client.final(3).error == ""


class Metaclass(type(RequestScheduler)):
    @property
    def __name__(cls):
        raise RuntimeError


class Nameless(Planned, metaclass=Metaclass):
    pass


class PartsThatRaise(Planned):
    @property
    def part_names(self):
        raise SystemExit


def made_of(names):
    return type("Planned", (Planned,), {"part_names": names})


@pytest.mark.parametrize("kind", [Nameless, PartsThatRaise, made_of(5), made_of((5,)), made_of([None]), made_of("ab")],
                         ids=["class", "property", "integer", "integers", "list", "text"])
def test_a_scheduler_that_cannot_say_what_it_is_made_of_is_named_by_its_class(make_world, new_request, kind):
    world = run(make_world, new_request, kind(lambda *lists: None))
    name = "Nameless" if kind is Nameless else type.__dict__["__name__"].__get__(kind)
    error = world.client.final(1).error
    assert f"{name} broke the scheduler contract: schedule_request returned a value of type NoneType" in error


def test_the_names_of_parts_are_printable_and_short():
    text = str(SchedulerContractError(made_of(("a\nb" * 40, "c"))(None), "x"))
    assert text.isprintable() and len(text) < 250
