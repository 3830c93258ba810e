"""The public table of statistics has the keys of the record, and the values that TensorRT-LLM lacks are right."""

import json

import pytest

from batch_manager import STATISTICS, KvCacheConfig, TrtGptModelType

SCHEMES = [TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1]


def records_of(world):
    return [json.loads(record) for record in world.client.stats]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_table_and_the_record_have_the_same_keys(scheme, make_world, new_request):
    world = make_world(model_type=scheme)
    world.client.pending = [new_request(1, [1], 3), new_request(2, [10**9], 3)]
    world.run()
    wanted = ("all", "V1" if scheme == TrtGptModelType.V1 else "in flight")
    always = {row.name for row in STATISTICS if row.always and row.schemes in wanted}
    known = {row.name for row in STATISTICS if row.schemes in wanted}
    for record in records_of(world):
        assert always <= set(record) <= known
        assert all((row.unit == "text") == isinstance(record[row.name], str)
                   for row in STATISTICS if row.name in record)


def test_the_table_names_each_key_once_and_a_time():
    assert len({row.name for row in STATISTICS}) == len(STATISTICS)
    assert {row.time for row in STATISTICS} == {"of this iteration", "now", "since the start"}


def test_what_is_counted_since_the_start_never_falls_and_finals_add_up(make_world, new_request):
    world = make_world(max_batch_size=2)
    world.client.pending = [new_request(i, [i + 1] * 3, 2 + i) for i in range(5)]
    world.step(2)
    world.client.stops = {4, 1}
    world.run()
    records = records_of(world)
    for row in STATISTICS:
        values = [record[row.name] for record in records if row.name in record]
        assert row.time != "since the start" or values == sorted(values), row.name
    last = records[-1]
    assert sum(value for name, value in last.items() if name.startswith("Finals ")) == last["Final Responses"]
    assert last["Finals Cancelled"] >= 1 and last["Finals Length"] >= 1
    assert sum(record["New Requests"] for record in records) == last["Final Responses"]
    assert last["Accepted Prompt Tokens"] == 3 * last["Final Responses"]


def test_queue_times_and_the_oldest_wait(make_world, new_request):
    world = make_world(max_batch_size=1)
    items = [new_request(1, [1], 2), new_request(2, [1] * 4, 1)]
    world.loop.callbacks.fetched._get = lambda n: [items.pop(0) for _ in list(items)]
    for _ in range(4):
        world.step()
        world.clock.now += 1.5
    records = records_of(world)
    assert [record["Oldest Wait Microseconds"] for record in records] == [0, 1_500_000, 0]
    assert [record["Queued Tokens"] for record in records] == [4, 4, 0]
    assert [record["Started Requests"] for record in records] == [1, 0, 1]
    assert [record["Queue Time Microseconds"] for record in records] == [0, 0, 3_000_000]
    assert records[-1]["Longest Queue Time Microseconds"] == 3_000_000
    assert records[1]["Monotonic Microseconds"] - records[0]["Monotonic Microseconds"] == 1_500_000


def test_tokens_looked_up_and_found(make_world, new_request):
    world = make_world(backend={"num_blocks": 20, "tokens_per_block": 4},
                       kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    for request_id in (1, 2):
        world.client.pending = [new_request(request_id, list(range(1, 11)), 2)]
        world.run()
    last = records_of(world)[-1]
    assert (last["Cache Lookup Tokens"], last["Cache Hit Tokens"]) == (20, 9)


@pytest.mark.parametrize("flush", [False, True])
def test_an_iteration_that_only_refused_has_a_record_and_an_idle_engine_none(flush, make_world, new_request):
    world = make_world(flush_stats_when_idle=flush)
    world.client.pending = [new_request(1, [10**9], 2), new_request(2, [], 2)]
    world.run()
    world.step(3)
    (record,) = records_of(world)
    assert (record["Refused Requests"], record["New Requests"], record["Active Request Count"]) == (2, 0, 0)
    assert record["Errors INVALID_REQUEST"] == 2 and record["Final Responses"] == 2
