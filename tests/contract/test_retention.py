"""A request can set the priority of its blocks in the KV cache. This changes only the order of eviction."""

import json

import pytest

from batch_manager import (
    KvCacheConfig,
    KvCacheRetentionConfig,
    SchedulerPolicy,
    TokenRangeRetentionConfig,
)
from batch_manager.stats.trace import Trace

REUSE = KvCacheConfig(enable_block_reuse=True)
SIZE, BLOCKS = 4, 10
FIRST, SECOND = list(range(100, 109)), list(range(200, 209))       # 9 tokens and 3 of output: three blocks each
LARGE = list(range(300, 325))                                      # 25 tokens and 3 of output: seven of ten blocks


def keep(priority, duration_ms=None, **decode):
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, priority, duration_ms)], **decode)


@pytest.fixture
def make_small_world(make_world):
    def make(**options):
        trace = Trace()
        world = make_world(backend={"num_blocks": BLOCKS, "tokens_per_block": SIZE}, parts={"trace": trace.append},
                           kv_cache_config=options.pop("kv", REUSE), **options)
        world.trace, world.asked = trace, 0
        return world

    return make


@pytest.fixture
def found(new_request):
    """found(world, prompt, retention=None) runs a request alone and returns the number of cached tokens it reuses."""

    def run(world, prompt, retention=None, count=3, **tensors):
        world.asked += 1
        request = new_request(world.asked, prompt, count, **tensors)
        request.kv_cache_retention_config = retention
        world.client.pending.append(request)
        world.run()
        final = world.client.final(world.asked)
        assert final.error == "" and final.tokens() == prompt + world.expected(prompt, count)
        starts = [chunk[1] for iteration in world.trace.iterations for chunk in iteration.context
                  if chunk[0] == world.asked]
        return starts[0]

    return run


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize(("retention", "first_survives"), [(None, False), (keep(80), True), (keep(35), False)])
def test_the_prompt_of_higher_priority_survives(make_small_world, found, policy, retention, first_survives):
    world = make_small_world(policy=policy)
    assert (found(world, FIRST, retention), found(world, SECOND), found(world, LARGE)) == (0, 0, 0)
    survivor, other = (FIRST, SECOND) if first_survives else (SECOND, FIRST)
    assert (found(world, survivor, count=1), found(world, other, count=1)) == (8, 0)


def test_the_prompt_of_lower_priority_goes_first(make_small_world, found):
    world = make_small_world()
    found(world, FIRST)
    found(world, SECOND, keep(0))
    found(world, LARGE)
    assert (found(world, FIRST, count=1), found(world, SECOND, count=1)) == (8, 0)


@pytest.mark.parametrize(("waited", "first_survives"), [(0.0, True), (4.9, True), (5.0, False), (60.0, False)])
def test_a_priority_ends_with_its_duration(make_small_world, found, waited, first_survives):
    world = make_small_world()
    found(world, FIRST, keep(80, duration_ms=5000, decode_retention_priority=80, decode_duration_ms=5000))
    found(world, SECOND, keep(50))
    world.clock.now += waited
    found(world, LARGE)
    assert (found(world, FIRST, count=1) > 0) is first_survives


def test_a_range_keeps_its_part_of_the_prompt(make_small_world, found):
    world = make_small_world()
    found(world, FIRST, KvCacheRetentionConfig([TokenRangeRetentionConfig(0, SIZE, 80)]))
    found(world, SECOND)
    found(world, LARGE)
    assert found(world, FIRST, count=1) == SIZE


@pytest.mark.parametrize(("decode_priority", "found_tokens"), [(100, 8 + SIZE - 1), (0, 8)])
def test_generated_tokens_have_a_priority_of_their_own(make_small_world, found, decode_priority, found_tokens):
    world = make_small_world()
    found(world, FIRST[:8], keep(90, decode_retention_priority=decode_priority), count=5)
    text = world.client.final(1).tokens()
    found(world, SECOND, keep(50))
    found(world, LARGE)
    assert found(world, text[:12], count=1) == found_tokens


def test_without_reuse_schedules_and_outputs_are_as_without_it(make_world, new_request):
    """Without block reuse, a retention configuration changes no schedule and no output."""
    prompts = [[*FIRST, number, *range(number)] for number in range(12)]

    def run(retentions):
        trace = Trace()
        world = make_world(backend={"num_blocks": 24, "tokens_per_block": SIZE}, kv_cache_config=KvCacheConfig(),
                           parts={"trace": trace.append})
        for number, prompt in enumerate(prompts):
            request = new_request(number, prompt, 12)
            request.kv_cache_retention_config = retentions[number % len(retentions)]
            world.client.pending.append(request)
        world.run()
        assert any(json.loads(record)["Paused Requests"] for record in world.client.stats)
        return [world.client.final(number).tokens() for number in range(len(prompts))], [
            (iteration.context, iteration.generation) for iteration in trace.iterations]

    assert run([None]) == run([keep(0), keep(100, 0), None, keep(50, 10, decode_retention_priority=99)])


def test_with_reuse_outputs_are_as_without_it(make_small_world, new_request):
    """With block reuse, a retention configuration changes no output."""
    def run(retentions):
        world = make_small_world()
        for number in range(24):
            prompt = [*FIRST, *SECOND][number % 5:number % 5 + 9]
            request = new_request(number, prompt, 6)
            request.kv_cache_retention_config = retentions[number % len(retentions)]
            world.client.pending.append(request)
        world.run()
        return [world.client.final(number).tokens() for number in range(24)]

    assert run([None]) == run([keep(0), keep(100), None, keep(50, 0, decode_retention_priority=99)])


def test_a_manager_serves_it_and_refuses_what_is_wrong(make_manager, new_client, new_request):
    """A manager applies a valid retention configuration and refuses an invalid one."""
    client, trace = new_client(), Trace()
    make_manager(client, backend={"num_blocks": BLOCKS, "tokens_per_block": SIZE}, kv_cache_config=REUSE,
                 parts={"trace": trace.append})
    wrong = keep(80)
    object.__setattr__(wrong, "decode_retention_priority", 101)
    steps = [(1, FIRST, keep(80)), (2, SECOND, None), (3, LARGE, None), (4, FIRST, None), (5, SECOND, None),
             (6, FIRST, wrong), (7, FIRST, "for ever")]
    for number, prompt, retention in steps:
        request = new_request(number, prompt, 3 if number < 4 else 1)
        request.kv_cache_retention_config = retention
        client.pending.append(request)
        client.wait_for_finals(number)
    starts = {chunk[0]: chunk[1] for iteration in trace.iterations for chunk in iteration.context}
    assert starts[4] == 8 and starts[5] == 0
    assert [client.final(number).error for number in range(1, 6)] == [""] * 5
    assert "decode_retention_priority is 101; it must be an integer in 0..100" in client.final(6).error
    assert "kv_cache_retention_config is of type str" in client.final(7).error


# Prompts that differ although their token ids are equal.


def test_extra_ids_keep_prompts_apart_and_change_no_output(make_small_world, found):
    world = make_small_world()
    apart = {"input_token_extra_ids": [0, 0, 0, 0, 7, 7, 0, 0, 0]}
    assert found(world, FIRST, **apart) == 0
    assert found(world, FIRST) == 0, "a prompt without extra ids is another one"
    assert found(world, FIRST, **apart) == 8
    assert found(world, FIRST, input_token_extra_ids=[0, 0, 0, 0, 7, 8, 0, 0, 0]) == SIZE + 1
    assert found(world, FIRST) == 8


@pytest.mark.parametrize(("extra_ids", "complaint"), [
    ([1] * 8, "the number of elements of input_token_extra_ids is 8; it must be 9 (one for each token of input_ids)"),
    ([-1] * 9, "input_token_extra_ids is -1; it must be an integer in 0..9223372036854775807"),
    ([2**63] * 9,
     "that does not fit int64; every value must be an integer in 0..9223372036854775807"),
    ([0.5] * 9, "input_token_extra_ids holds ")])
def test_extra_ids_that_do_not_fit_the_prompt_are_refused(make_world, new_request, extra_ids, complaint):
    world = make_world()
    world.client.pending = [new_request(1, FIRST, 3, input_token_extra_ids=extra_ids)]
    world.run()
    assert complaint in world.client.final(1).error and world.client.final(1).code == "INVALID_REQUEST"


# Parts of blocks.


@pytest.mark.parametrize(("partial", "expected"), [(True, 10), (False, 8)])
def test_the_beginning_of_a_block_is_used_again_unless_that_is_switched_off(make_small_world, found, partial, expected):
    world = make_small_world(kv=KvCacheConfig(enable_block_reuse=True, enable_partial_reuse=partial))
    prompt = list(range(100, 114))
    found(world, prompt)
    assert found(world, [*prompt[:10], 7, 8, 9]) == expected
    assert found(world, prompt) == (13 if partial else 12)


def test_a_block_whose_content_is_lost_is_not_kept_for_its_priority(make_small_world, found):
    """When the block of a prompt is evicted, the blocks of its output lose their retention priority of 100.

    No prompt can find the blocks of the output any more.
    """
    world = make_small_world()
    found(world, FIRST[:4], keep(1, decode_retention_priority=100), count=18)      # one block of prompt, 4 of output
    for start in range(400, 1000, 100):
        found(world, list(range(start, start + 9)))
    assert found(world, SECOND) == 0 and found(world, SECOND) == 8
    assert {world.loop.kv.pool.priority(block_id) for block_id in range(BLOCKS)} == {35}


def test_what_a_failed_request_leaves_is_not_kept_for_its_priority(make_world, new_request, found):
    def fails(batch):
        if world.asked == 1 and batch.iteration == 2:
            raise RuntimeError("planted")

    world = make_world(backend={"num_blocks": BLOCKS, "tokens_per_block": SIZE, "on_step": fails},
                       kv_cache_config=REUSE)
    request = new_request(1, FIRST, 6)
    request.kv_cache_retention_config = keep(100, decode_retention_priority=100)
    world.asked, world.client.pending = 1, [request]
    world.run()
    assert world.client.final(1).code == "MODEL_ERROR"
    pool = world.loop.kv.pool
    assert {pool.priority(block_id) for block_id in range(BLOCKS)
            if world.loop.kv.cache.index.of_block(block_id) is None} == {35}
