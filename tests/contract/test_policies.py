"""C9 to C11: each scheduler policy keeps its promises in the loop, and a wrong scheduler cannot break the engine."""

import json
import random

import pytest

from batch_manager import (
    CapacityScheduler,
    ConfigError,
    ContextChunkingPolicy,
    KvCacheConfig,
    RequestScheduler,
    SchedulerOutput,
    SchedulerPolicy,
)
from batch_manager.errors import InternalError
from batch_manager.scheduling.policies import make_scheduler
from batch_manager.stats.trace import Trace

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
SMALL_POOL = {"num_blocks": 9, "tokens_per_block": 4}


def submit(world, new_request, count=12, seed=0):
    draw = random.Random(seed)
    prompts = {i: [draw.randrange(1000) for _ in range(draw.randrange(1, 17))] for i in range(count)}
    lengths = {i: draw.randrange(1, 16) for i in prompts}
    world.client.pending = [new_request(i, prompt, lengths[i], streaming=i % 3 == 0) for i, prompt in prompts.items()]
    return prompts, lengths


def assert_right(world, prompts, lengths):
    for i, prompt in prompts.items():
        got = world.client.streamed(i) if i % 3 == 0 else world.client.final(i).tokens()[len(prompt):]
        assert got == world.expected(prompt, lengths[i])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunked", [False, True])
def test_c9_guaranteed_no_evict_never_pauses(make_world, new_request, seed, chunked):
    trace = Trace()
    world = make_world(policy=GUARANTEED, backend=SMALL_POOL, enable_chunked_context=chunked, max_num_tokens=20,
                       parts={"trace": trace.append})
    prompts, lengths = submit(world, new_request, seed=seed)
    world.run()
    assert_right(world, prompts, lengths)
    assert not any(iteration.paused for iteration in trace.iterations)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunked", [False, True])
def test_c10_pausing_changes_latency_only_and_the_oldest_is_never_paused_and_always_advances(
        make_world, new_request, seed, chunked):
    trace = Trace()
    world = make_world(policy=MAX, backend=SMALL_POOL, enable_chunked_context=chunked, max_num_tokens=40,
                       parts={"trace": trace.append})
    prompts, lengths = submit(world, new_request, seed=seed)
    world.run()
    assert_right(world, prompts, lengths)
    alive = list(prompts)
    for iteration in trace.iterations:
        oldest = alive[0]
        assert oldest not in iteration.paused
        assert oldest in iteration.generation or oldest in [chunk[0] for chunk in iteration.context]
        alive = [i for i in alive if i not in iteration.finished]
    assert sum(len(iteration.paused) for iteration in trace.iterations) > 0


def test_a_streamed_position_is_never_sent_again_after_a_pause(make_world, new_request):
    world = make_world(policy=MAX, backend={"num_blocks": 6, "tokens_per_block": 4})
    world.client.pending = [new_request(i, [i] * 5, 12, streaming=True) for i in range(3)]
    world.run()
    assert sum(json.loads(record)["Paused Requests"] for record in world.client.stats) > 0
    for i in range(3):
        assert [len(response.tokens()) for response in world.client.responses[i]] == [1] * 12
        assert world.client.streamed(i) == world.expected([i] * 5, 12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_that_was_paused_with_more_tokens_than_a_step_runs_goes_on_where_it_was(
        make_world, new_request, seed, overlap):
    """A paused stream continues although its prompt and output exceed max_num_tokens. No token is sent twice.

    Although chunked context is off, the context after the pause is computed in chunks.
    """
    draw, trace = random.Random(seed), Trace()
    world = make_world(policy=MAX, backend={"num_blocks": 16, "tokens_per_block": 4}, max_num_tokens=10,
                       enable_trt_overlap=overlap, parts={"trace": trace.append})
    prompts = {i: [draw.randrange(1000) for _ in range(draw.randrange(1, 11))] for i in range(6)}
    lengths = {i: draw.randrange(20, 45) for i in prompts}
    world.client.pending = [new_request(i, prompt, lengths[i], streaming=i != 3) for i, prompt in prompts.items()]
    world.run()
    chunks = [chunk for iteration in trace.iterations for chunk in iteration.context]
    assert all(size <= 10 for _, _, size in chunks) and sum(start + size > 10 for _, start, size in chunks) > 3
    assert sum(len(iteration.paused) for iteration in trace.iterations) > 1
    for i, prompt in prompts.items():
        if i == 3:
            assert world.client.final(i).tokens() == prompt + world.expected(prompt, lengths[i])
        else:
            assert world.client.streamed(i) == world.expected(prompt, lengths[i])
            assert [len(response.tokens()) for response in world.client.responses[i]] == [1] * lengths[i]


class PausesAtEveryLength(RequestScheduler):
    """A scheduler that pauses each generating request that has grown since its last pause.

    It leaves at least one request in every plan.
    """

    def __init__(self, limits, kv_cache_manager):
        self.scheduler, self.paused_at = make_scheduler(limits, kv_cache_manager), {}

    def schedule_request(self, active_requests, inflight_request_ids):
        plan = self.scheduler.schedule_request(active_requests, inflight_request_ids)
        victims = [request for request in plan.generation_requests
                   if request.num_tokens > self.paused_at.get(request.request_id, request.orig_prompt_len + 1)]
        if len(victims) == len(plan.generation_requests) and not plan.context_requests:
            victims = victims[1:]
        self.paused_at.update((request.request_id, request.num_tokens) for request in victims)
        generation = [request for request in plan.generation_requests if request not in victims]
        return SchedulerOutput(plan.context_requests, generation, [*plan.paused_requests, *victims], plan.chunk_sizes)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_stream_may_be_paused_at_any_length(make_world, new_request, reuse):
    world = make_world(policy=MAX, backend={"num_blocks": 60, "tokens_per_block": 4}, max_num_tokens=6,
                       kv_cache_config=KvCacheConfig(enable_block_reuse=reuse),
                       parts={"scheduler": PausesAtEveryLength})
    prompts = {0: [7, 8], 1: [9], 2: [1, 2, 3, 4, 5]}
    world.client.pending = [new_request(i, prompt, 30, streaming=True) for i, prompt in prompts.items()]
    world.run()
    assert sum(json.loads(record)["Paused Requests"] for record in world.client.stats) > 20
    for i, prompt in prompts.items():
        assert world.client.streamed(i) == world.expected(prompt, 30)
        assert [len(response.tokens()) for response in world.client.responses[i]] == [1] * 30


@pytest.mark.parametrize("policy", [MAX, GUARANTEED])
@pytest.mark.parametrize("chunking", list(ContextChunkingPolicy))
def test_contexts_come_before_generation_and_chunks_but_the_last_are_whole_blocks(
        make_world, new_request, policy, chunking):
    batches = []
    from batch_manager.testing.scripted_backend import ScriptedBackend
    world = make_world(policy=policy, backend=ScriptedBackend(num_blocks=40, tokens_per_block=4,
                                                              on_step=lambda batch: batches.append(batch)),
                       enable_chunked_context=True, context_chunking_policy=chunking, max_num_tokens=14)
    prompts, lengths = submit(world, new_request)
    world.run()
    assert_right(world, prompts, lengths)
    assert any(len(batch.context) and len(batch.generation) for batch in batches)
    for batch in batches:
        assert batch.num_context_tokens + len(batch.generation) <= 14
        assert all(work.is_last_chunk or len(work.token_ids) % 4 == 0 for work in batch.context)


class Everything(CapacityScheduler):
    """A scheduler that plans every request, however few blocks are free."""

    def schedule_request(self, active_requests):
        return list(active_requests), []


class Nothing(CapacityScheduler):
    def schedule_request(self, active_requests):
        return [], []


class Raises(CapacityScheduler):
    def schedule_request(self, active_requests):
        raise ValueError("oops")


class Stranger(RequestScheduler):
    def schedule_request(self, active_requests, inflight_request_ids):
        from batch_manager.requests.llm_request import LlmRequest
        return SchedulerOutput([LlmRequest(999, [1], 1)], [], [])


class Twice(RequestScheduler):
    def schedule_request(self, active_requests, inflight_request_ids):
        return SchedulerOutput(active_requests + active_requests, [], [])


class GeneratesAtOnce(RequestScheduler):
    def schedule_request(self, active_requests, inflight_request_ids):
        return SchedulerOutput([], active_requests, [])


@pytest.mark.parametrize("scheduler", [Everything(), Nothing(), Raises(), Stranger(), Twice(), GeneratesAtOnce()],
                         ids=lambda scheduler: type(scheduler).__name__)
def test_a_scheduler_that_breaks_a_rule_is_named_to_every_active_request_and_the_process_lives(
        make_world, new_request, scheduler):
    world = make_world(backend={"num_blocks": 4, "tokens_per_block": 4}, parts={"scheduler": scheduler})
    world.client.pending = [new_request(i, [1] * 6, 4) for i in range(4)]
    world.run()
    assert all(type(scheduler).__name__ in world.client.final(i).error for i in range(4))
    assert world.loop.failure is None and world.loop.kv.used_blocks == 0


def test_a_double_is_refused_before_the_request_it_is_a_double_of_is_answered(make_world, new_request):
    """A duplicate is refused before the live request with its id gets its final response.

    The scheduler fails in the iteration that gets both.
    """
    world = make_world(parts={"scheduler": Raises()})
    world.client.pending = [new_request(1, [1], 4), new_request(1, [1], 4)]
    world.step()
    assert [final.code for final in world.client.finals(1)] == ["DUPLICATE_REQUEST_ID", "ENGINE_FAILED"]


def test_a_custom_scheduler_may_be_a_class_or_a_factory(make_world, new_request):
    class FirstOnly(CapacityScheduler):
        def __init__(self, limits, kv_cache_manager):
            self.limits = limits

        def schedule_request(self, active_requests):
            return active_requests[:1], []

    for part in (FirstOnly, lambda limits, kv: FirstOnly(limits, kv)):
        world = make_world(parts={"scheduler": part})
        prompts, lengths = submit(world, new_request, count=4)
        world.run()
        assert_right(world, prompts, lengths)
    with pytest.raises(ConfigError, match="Parts.scheduler"):
        make_world(parts={"scheduler": 5})


def test_c11_a_broken_pool_is_a_bug_of_ours_and_fails_the_engine(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(i, [i], 900) for i in range(3)]
    manager = make_manager(client)
    while manager.num_active_requests < 3:
        pass
    manager._loop.kv.pool.free.popitem()
    client.wait_for_finals(0, 1, 2)
    assert {client.final(i).code for i in range(3)} == {"ENGINE_FAILED"}
    assert isinstance(manager._loop.failure, InternalError)


def test_a_step_too_small_for_a_block_is_refused_where_a_pause_could_need_it(make_world):
    with pytest.raises(ConfigError, match="max_num_tokens"):
        make_world(policy=MAX, max_num_tokens=7, backend={"tokens_per_block": 8})
    make_world(policy=GUARANTEED, max_num_tokens=7, backend={"tokens_per_block": 8})
    with pytest.raises(ConfigError, match="max_num_tokens"):
        make_world(policy=GUARANTEED, enable_chunked_context=True, max_num_tokens=7, backend={"tokens_per_block": 8})
