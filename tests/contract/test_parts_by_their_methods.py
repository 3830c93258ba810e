"""Parts are recognised by their methods. The constructor refuses a part that lacks a method."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from batch_manager import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    Parts,
    RequestScheduler,
    SchedulerOutput,
    SimpleScheduler,
)
from batch_manager.custom_parts import checked_attention
from batch_manager.errors import ConfigError, InsufficientMemoryError
from batch_manager.scheduling.micro_batch import EvenMicroBatches, TokenBudgetScheduler
from batch_manager.testing.scripted_backend import ScriptedBackend

PROMPTS = {1: [5, 6, 7], 2: [8, 9], 3: [4]}
METHODS = ("start", "memory_usage", "close")


class Everything:
    def schedule_request(self, active_requests, inflight_request_ids):
        return SchedulerOutput(*contexts_and_generation(active_requests))


class WhoGetsBlocks:
    def schedule_request(self, active_requests):
        return active_requests, []


class OneAtATime:
    asked = 0

    def schedule(self, fitting_requests, inflight_request_ids):
        self.asked += 1
        return contexts_and_generation(fitting_requests[:1])


def contexts_and_generation(requests):
    return [r for r in requests if r.is_context], [r for r in requests if r.is_generating]


class InheritsEverything(Everything, RequestScheduler):
    pass


class InheritsWhoGetsBlocks(WhoGetsBlocks, CapacityScheduler):
    pass


class InheritsOneAtATime(OneAtATime, MicroBatchScheduler):
    pass


KINDS = [Everything, WhoGetsBlocks, OneAtATime, InheritsEverything, InheritsWhoGetsBlocks, InheritsOneAtATime]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["object", "class", "factory"])
def test_a_scheduler_of_any_kind_may_be_an_object_a_class_or_a_factory(make_world, new_request, kind, given):
    scheduler = {"object": kind(), "class": kind, "factory": lambda limits, kv_cache_manager: kind()}[given]
    world = make_world(parts={"scheduler": scheduler})
    world.client.pending = [new_request(i, prompt, 4) for i, prompt in PROMPTS.items()]
    world.run()
    for i, prompt in PROMPTS.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 4)
    if kind is OneAtATime and given == "object":
        assert scheduler.asked == 4 * len(PROMPTS)


def test_a_class_may_take_the_limits_and_the_kv_cache_manager(make_world):
    class Takes(InheritsWhoGetsBlocks):
        def __init__(self, limits, kv_cache_manager):
            self.limits, self.kv = limits, kv_cache_manager

    world = make_world(parts={"scheduler": Takes})
    assert world.loop.scheduler.capacity_scheduler.limits is world.loop.limits
    assert world.loop.scheduler.capacity_scheduler.kv is world.loop.kv


class TakesFive(InheritsOneAtATime):
    def __init__(self, a, b, c, d, e):
        pass


@pytest.mark.parametrize(("scheduler", "said"), [
    (TakesFive, "Parts.scheduler is the class TakesFive; expected a class whose constructor takes"),
    (SimpleScheduler, "Parts.scheduler is the class SimpleScheduler; .*a function .limits, kv_cache_manager. that"),
    (MaxUtilizationScheduler, "Parts.scheduler is the class MaxUtilizationScheduler; expected a class whose"),
    (GuaranteedNoEvictScheduler, "Parts.scheduler is the class GuaranteedNoEvictScheduler; expected a class whose"),
    (TokenBudgetScheduler, "Parts.scheduler is the class TokenBudgetScheduler; expected a class whose"),
    (EvenMicroBatches, "Parts.scheduler is the class EvenMicroBatches; expected a class whose"),
    (type("Mine", (MaxUtilizationScheduler,), {}), "Parts.scheduler is the class Mine; expected a class whose"),
    (5, "Parts.scheduler is of type int"), (SimpleNamespace(), "Parts.scheduler is of type SimpleNamespace"),
    (lambda limits, kv: None, "returned a value of type NoneType"),
    (lambda limits, kv: 1 / 0, "the factory in Parts.scheduler raised ZeroDivisionError: division by zero"),
    (lambda limits, kv: Everything, "returned a value of type type"),
    (lambda limits, kv: SimpleNamespace(schedule=1), "returned a value of type SimpleNamespace")])
def test_what_is_no_scheduler_is_refused(make_world, scheduler, said):
    with pytest.raises(ConfigError, match=said):
        make_world(parts={"scheduler": scheduler})


@pytest.mark.parametrize("given", ["object", "factory"])
@pytest.mark.parametrize("missing", METHODS)
def test_a_backend_is_refused_by_the_name_of_the_method_it_lacks(make_manager, new_client, missing, given):
    closed = []
    methods = dict.fromkeys(METHODS, print) | {"close": lambda: closed.append(1), "info": ScriptedBackend().info}
    backend = SimpleNamespace(**methods | {missing: None})
    with pytest.raises(ConfigError, match=f"SimpleNamespace in Parts.backend lacks {missing}; "):
        make_manager(new_client(), model_path="", parts={"backend": backend if given == "object" else lambda: backend})
    assert closed == [1] * (missing != "close")


def test_a_backend_without_info_is_refused_by_that_name(make_manager, new_client):
    with pytest.raises(ConfigError, match="SimpleNamespace in Parts.backend lacks info; .*all of its methods and its"):
        make_manager(new_client(), model_path="", parts={"backend": SimpleNamespace(**dict.fromkeys(METHODS, print))})


def test_a_backend_with_these_methods_is_all_there_need_be_and_copies_are_needed_by_nobody_who_copies_no_blocks(
        make_manager, new_client, new_request):
    """A backend needs no base class. It need not copy blocks if the engine has no beams and no block reuse."""
    whole = ScriptedBackend()
    client = new_client()
    client.pending = [new_request(1, [5, 6], 3)]
    make_manager(client, model_path="", parts={"backend": SimpleNamespace(
        info=replace(whole.info, copies_blocks=False), **{name: getattr(whole, name) for name in METHODS})})
    client.wait_for_finals(1)
    assert client.final(1).tokens() == [5, 6, *whole.expected([5, 6], 3)]


@pytest.mark.parametrize(("made", "lacks"), [
    (None, "a value of type NoneType, which lacks plan, run, dispatch"),
    (SimpleNamespace(plan=print, run=print), "a value of type SimpleNamespace, which lacks dispatch"),
    (SimpleNamespace(plan=print, run=5, dispatch="torch"), "a value of type SimpleNamespace, which lacks run")])
def test_an_attention_that_is_none_is_refused_by_what_it_lacks(make_manager, new_client, made, lacks):
    with pytest.raises(ConfigError, match=f"Parts.attention returned {lacks}; expected an attention implementation"):
        make_manager(new_client(), model_path="examples/models/austen-4m", max_seq_len=64,
                     parts={"attention": lambda *given, **options: made})


def test_a_factory_of_attention_is_given_what_it_was_given_before():
    """`checked_attention`, which wraps the factory in Parts.attention, passes all arguments to the factory."""
    whole = SimpleNamespace(plan=print, run=print, dispatch="torch")
    given = []

    def factory(spec, kv_pool, **options):
        given.append((spec, kv_pool, options))
        return whole

    assert checked_attention(None) is None and Parts(attention=factory).attention is factory
    assert checked_attention(factory)(1, 2, sink=3) is whole and given == [(1, 2, {"sink": 3})]


def fails(*given, **options):
    raise ZeroDivisionError("a bug of the factory")


@pytest.mark.parametrize("name", ["attention", "stages", "backend", "scheduler"])
def test_a_factory_that_raises_is_named_in_the_caller(make_manager, new_client, name):
    own = {"backend": ScriptedBackend()} if name == "scheduler" else {}
    path = {"model_path": "examples/models/austen-4m"} if name in ("attention", "stages") else {"model_path": ""}
    with pytest.raises(ConfigError, match=f"^the factory in Parts.{name} raised ZeroDivisionError: a bug of the "
                                          "factory; expected it to return the part; correct the factory"):
        make_manager(new_client(), max_seq_len=64, parts={**own, name: fails}, **path)


def test_a_factory_that_runs_out_of_memory_gets_the_advice_for_memory(make_manager, new_client):
    torch = pytest.importorskip("torch")

    def exhausted(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InsufficientMemoryError, match=(
            "no memory is left for a step .*: the factory in Parts.attention raised OutOfMemoryError: CUDA out of "
            "memory; a step of the largest batch must fit .*; lower max_num_sequences")):
        make_manager(new_client(), max_seq_len=64, model_path="examples/models/austen-4m",
                     parts={"attention": exhausted})
