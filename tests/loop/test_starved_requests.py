"""A scheduler that starves a started request is named in an error. A scheduler that only delays a request is not."""

import importlib.util
import random
from pathlib import Path

import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy
from batch_manager.scheduling import starvation
from batch_manager.scheduling.interfaces import RequestScheduler, SchedulerOutput
from batch_manager.scheduling.policies import make_scheduler


class Forgetful(RequestScheduler):
    """A scheduler that, once request `forgotten` holds blocks, leaves it out of all plans except every `nap`th."""

    def __init__(self, limits, kv_cache_manager, forgotten=1, nap=0):
        self.scheduler, self.kv = make_scheduler(limits, kv_cache_manager), kv_cache_manager
        self.forgotten, self.nap, self.plans = forgotten, nap, 0

    def schedule_request(self, active_requests, inflight_request_ids):
        plan = self.scheduler.schedule_request(active_requests, inflight_request_ids)
        self.plans += 1
        if self.nap and self.plans % self.nap == 0:
            return plan
        contexts = plan.context_requests
        sizes = plan.chunk_sizes or [request.remaining_context for request in contexts]
        kept = [(r, size) for r, size in zip(contexts, sizes) if r.request_id != self.forgotten or not self.kv.owns(r)]
        generation = [r for r in plan.generation_requests if r.request_id != self.forgotten]
        return SchedulerOutput([r for r, _ in kept], generation, plan.paused_requests, [size for _, size in kept])


@pytest.fixture
def soon(monkeypatch):
    """Make the engine check every plan, and fail if 20 plans pass over a request."""
    monkeypatch.setattr(starvation, "CHECK_EVERY", 1)
    monkeypatch.setattr(starvation, "MAX_CHECKS", 20)


def crowd(new_request, draw, first=0, count=40, longest=30):
    return [new_request(first + i, [draw.randrange(1000) for _ in range(draw.randrange(1, longest))],
                        draw.randrange(1, 25), priority=draw.choice([0.5, 0.5, 0.9, 0.1])) for i in range(count)]


@pytest.mark.parametrize("chunked", [False, True], ids=["generating", "between chunks"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_forgotten_request_is_named_and_everybody_is_answered_and_the_engine_lives(
        make_world, new_request, soon, chunked, overlap):
    world = make_world(backend={"tokens_per_block": 4, "num_blocks": 100}, parts={"scheduler": Forgetful},
                       enable_chunked_context=chunked, enable_trt_overlap=overlap,
                       max_num_tokens=16 if chunked else 100)
    world.client.pending = [new_request(9, [5] * 3, 90)]
    world.step(2)
    world.client.pending = [new_request(1, [7] * 30, 50), *(new_request(i, [i] * 3, 60) for i in (2, 3))]
    world.run()
    for i in (1, 2, 3):
        error = world.client.final(i).error
        assert "Forgetful broke the scheduler contract: LlmRequest(1, " in error and "20 plans neither" in error
    world.loop.scheduler.forgotten = None
    world.client.pending = [new_request(4, [1, 2], 9)]
    world.run()
    assert world.client.final(4).tokens() == [1, 2, *world.expected([1, 2], 9)]


def test_the_bound_is_ten_thousand_plans(make_world, new_request):
    world = make_world(backend={"tokens_per_block": 8, "num_blocks": 4000, "max_seq_len": 30_000, "verify": False},
                       parts={"scheduler": Forgetful})
    world.client.pending = [new_request(1, [7], 9), new_request(2, [8], 29_000)]
    plans = 0
    while not world.client.finals(1):
        world.loop.step(accept_new=True)                           # no audit: it would dominate the run time
        plans += 1
    assert 10_000 <= plans <= 10_000 + 2 * starvation.CHECK_EVERY
    assert "10000 plans neither" in world.client.final(1).error


def test_one_who_is_passed_over_and_then_taken_up_is_not_forgotten(make_world, new_request, soon):
    world = make_world(backend={"tokens_per_block": 4, "num_blocks": 100},
                       parts={"scheduler": lambda limits, kv: Forgetful(limits, kv, nap=19)})
    world.client.pending = [new_request(1, [7] * 3, 5), new_request(2, [8], 120)]
    world.run()
    assert world.client.final(1).tokens() == [7] * 3 + world.expected([7] * 3, 5)


def test_one_who_holds_nothing_is_waiting_and_not_forgotten(make_world, new_request, soon):
    class OneAtATime(Forgetful):
        def schedule_request(self, active_requests, inflight_request_ids):
            return self.scheduler.schedule_request(active_requests[-1:], inflight_request_ids)

    world = make_world(parts={"scheduler": OneAtATime})
    world.client.pending = [new_request(1, [7], 5), new_request(2, [8], 200)]
    world.run()
    assert world.client.final(1).error == world.client.final(2).error == ""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_our_own_policies_pass_nobody_over(make_world, new_request, monkeypatch, policy, overlap, chunked, seed):
    """No plan of the package's policies passes over a request, with tiny budgets, priorities, many chunks and pauses.

    A request waits only if it has no room, or if no later request is scheduled. With overlap, the scheduler divides
    the requests evenly between two micro-batches, so that a request is passed over in at most two checks between two
    of its steps.
    """
    monkeypatch.setattr(starvation, "CHECK_EVERY", 1)
    monkeypatch.setattr(starvation, "MAX_CHECKS", 3 if overlap else 1)
    draw = random.Random(seed)
    world = make_world(policy=policy, backend={"tokens_per_block": 4, "num_blocks": 14 + seed * 4},
                       enable_chunked_context=chunked, enable_trt_overlap=overlap, max_num_sequences=16,
                       max_num_tokens=draw.choice([8, 12, 20]) if chunked else 56,
                       max_batch_size=draw.choice([2, 3, 8]),
                       kv_cache_config=KvCacheConfig(enable_block_reuse=seed % 2 == 0))
    for i, item in enumerate(crowd(new_request, draw)):
        world.client.pending.append(item)
        if i % 4 == 0:
            world.loop.step(accept_new=True)                       # no audit, which other tests do
    while not world.loop.is_empty:
        world.loop.step(accept_new=True)
    assert {world.client.final(i).error for i in range(40)} == {""}


def test_the_example_of_a_scheduler_is_legal(make_world, new_request, soon):
    path = Path(__file__).parents[2] / "examples" / "custom_scheduler.py"
    spec = importlib.util.spec_from_file_location("custom_scheduler_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    world = make_world(backend={"tokens_per_block": 4, "num_blocks": 20},
                       parts={"scheduler": example.ShortestJobFirst}, max_num_sequences=30)
    world.client.pending = crowd(new_request, random.Random(2))
    world.run()
    assert {world.client.final(i).error for i in range(40)} == {""}
