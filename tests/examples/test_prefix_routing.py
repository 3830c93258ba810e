"""examples/prefix_routing.py, without Ray: prompts go to the engine that has their beginning."""

from collections import Counter
from random import Random

import pytest

from batch_manager import KvCacheConfig, kv_block_hashes
from examples.prefix_routing import CachedBlocks, ranked
from tests.harness.kv_replay import KEY

SIZE, SHARED = 8, 4 * 8                        # tokens of a block, and of the beginning that prompts share


def engines(make_world):
    """Two engines, each with the CachedBlocks of its events in `blocks`."""
    worlds = {}
    for name in "ab":
        blocks = CachedBlocks()
        worlds[name] = make_world(
            backend={"num_blocks": 300, "tokens_per_block": SIZE}, parts={"kv_events": blocks.take},
            kv_cache_config=KvCacheConfig(enable_block_reuse=True, event_hash_key=KEY))
        worlds[name].blocks = blocks
    return worlds


def answer(world, new_request, request_id, prompt):
    """Run a prompt. Returns how many of its tokens were cached."""
    world.client.pending.append(new_request(request_id, prompt, 2, return_perf_metrics=True))
    world.run()
    return int(world.client.final(request_id).tensors["cached_tokens"][0])


@pytest.mark.parametrize("prompts_between_reports", [1, 10])
def test_at_least_90_percent_of_prompts_with_a_shared_beginning_go_where_it_is(
        make_world, new_request, prompts_between_reports):
    draw, worlds = Random(1), engines(make_world)
    families = [[draw.randrange(200) for _ in range(SHARED)] for _ in range(12)]
    for number, family in enumerate(families):                 # where their own order would not send them
        answer(worlds[ranked({"a": {}, "b": {}}, family)[number % 2]], new_request, number, family)
    went, by_order = Counter(), Counter()
    for number in range(200):
        if number % prompts_between_reports == 0:
            reports = {name: {"cached": world.blocks.packed()} for name, world in worlds.items()}
        prompt = [*draw.choice(families), *(draw.randrange(200) for _ in range(draw.randrange(1, 40)))]
        hashes = kv_block_hashes(prompt, SIZE, event_hash_key=KEY)
        chosen = ranked(reports, prompt, hashes)[0]
        went[answer(worlds[chosen], new_request, 100 + number, prompt) >= SHARED] += 1
        by_order[ranked({"a": {}, "b": {}}, prompt)[0] == chosen] += 1
    assert went[True] >= 0.9 * went.total() and by_order[False] > 0.3 * by_order.total()


def test_removed_blocks_are_forgotten(make_world, new_request):
    world, draw = engines(make_world)["a"], Random(2)
    for number in range(60):
        answer(world, new_request, number, [draw.randrange(200) for _ in range(80)])
        index = world.loop.kv.cache.index
        assert len(world.blocks.packed()) == 8 * sum(len(node.key.tokens) == SIZE for node in index)


def test_prompts_that_begin_alike_go_to_one_replica_and_others_are_spread():
    replicas = {"a": {}, "b": {}, "c": {}}
    for number in range(20):
        prefix = [number] * 64
        assert len({ranked(replicas, prefix + [tail])[0] for tail in range(5)}) == 1
    assert min(Counter(ranked(replicas, [number] * 64)[0] for number in range(300)).values()) > 60


@pytest.mark.parametrize("full", [{"free_share": 0.05}, {"active": 32, "max_active": 32}])
def test_a_replica_without_room_comes_last(full):
    hashes = kv_block_hashes(range(64), 64, event_hash_key=KEY)
    cached = hashes[0].to_bytes(8, "little")
    for number in range(20):
        assert ranked({"a": {**full, "cached": cached}, "b": {"free_share": 0.5}, "c": {}}, [number], hashes)[-1] == "a"
        assert ranked({"a": {"cached": cached}, "b": {}, "c": {}}, [number], hashes)[0] == "a"
