"""Section 5: the record of an iteration has the right values, with the names of TensorRT-LLM's statistics."""

import json
import re

import numpy as np
import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy
from batch_manager.testing import EngineHarness, ScriptedBackend

NAMES = ["Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count", "Runtime GPU Memory Usage",
         "Runtime CPU Memory Usage", "Runtime Pinned Memory Usage", "Max KV cache blocks", "Free KV cache blocks",
         "Used KV cache blocks", "Tokens per KV cache block", "Reused KV cache blocks", "Scheduled Requests",
         "Context Requests", "Generation Requests", "Total Context Tokens", "Paused Requests", "MicroBatch ID"]


def run(make_world, new_request, **params):
    world = make_world(backend={"num_blocks": 6, "tokens_per_block": 4}, **params)
    world.client.pending = [new_request(i, [i + 1] * 5, 8) for i in range(4)]
    world.run()
    return world, [json.loads(record) for record in world.client.stats]


def test_a_record_has_exactly_the_documented_names_and_integers_sorted(make_world, new_request):
    world, records = run(make_world, new_request)
    for text, record in zip(world.client.stats, records):
        assert set(NAMES) <= set(record)
        assert list(record) == sorted(record)
        assert all(type(record[name]) is int for name in NAMES if name != "Timestamp")
        assert not any(isinstance(value, dict | list | float) for value in record.values()), "one flat object"
        assert re.fullmatch(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d", record["Timestamp"])
        assert "\n" not in text


def test_the_iteration_counter_rises_by_one(make_world, new_request):
    _, records = run(make_world, new_request)
    assert [record["Iteration Counter"] for record in records] == list(range(len(records)))


def test_free_and_used_blocks_add_up_in_every_record(make_world, new_request):
    _, records = run(make_world, new_request)
    assert all(record["Free KV cache blocks"] + record["Used KV cache blocks"] == record["Max KV cache blocks"] == 6
               for record in records)
    assert max(record["Used KV cache blocks"] for record in records) == 6


def test_scheduled_is_context_plus_generation_and_tokens_add_up(make_world, new_request):
    _, records = run(make_world, new_request, policy=SchedulerPolicy.GUARANTEED_NO_EVICT)
    assert all(record["Scheduled Requests"] == record["Context Requests"] + record["Generation Requests"]
               for record in records)
    assert sum(record["Total Context Tokens"] for record in records) == 4 * 5
    assert sum(record["Generated Tokens"] for record in records) == 4 * 8
    assert sum(record["Paused Requests"] for record in records) == 0


def test_pauses_and_recomputed_tokens_are_reported(make_world, new_request):
    _, records = run(make_world, new_request)
    assert sum(record["Paused Requests"] for record in records) > 0
    assert records[-1]["Recomputed Tokens"] > 0
    assert sum(record["Total Context Tokens"] for record in records) == 4 * 5 + records[-1]["Recomputed Tokens"] + sum(
        record["Paused Requests"] for record in records), "a resumed request also computes its newest token"


def test_recomputed_tokens_are_those_that_no_cached_block_spares(make_world, new_request):
    world = make_world(policy=SchedulerPolicy.MAX_UTILIZATION, backend={"num_blocks": 14, "tokens_per_block": 4},
                       kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    shared, seen = [9] * 12, {}
    world.client.pending = [new_request(i, [*shared, *[i + 1] * 5], 12, return_perf_metrics=True) for i in range(6)]
    world.client.on_send = lambda request_id, response: seen.update({request_id: response})
    world.run()
    records = [json.loads(text) for text in world.client.stats]
    pauses, computed = (sum(record[key] for record in records) for key in ("Paused Requests", "Total Context Tokens"))
    metrics = [{name: int(value[0]) for name, value in seen[i].tensors.items() if value.ndim == 1} for i in range(6)]
    recomputed = records[-1]["Recomputed Tokens"]
    assert pauses > 2 and recomputed == sum(each["recomputed_tokens"] for each in metrics) > 0
    first_time = sum(17 - each["cached_tokens"] for each in metrics)
    assert computed == first_time + recomputed + pauses, "a resumed request also computes its newest token"


def test_errors_are_counted_by_code(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [], 1), new_request(2, [1], 1), new_request(2, [1], 1)]
    world.run()
    record = json.loads(world.client.stats[-1])
    assert record["Errors INVALID_REQUEST"] == 1 and record["Errors DUPLICATE_REQUEST_ID"] == 1
    assert record["Final Responses"] == 3


def test_the_kernel_dispatch_and_the_block_size_are_named(make_world, new_request):
    world = make_world(backend={"tokens_per_block": 16}, kv_cache_config=KvCacheConfig())
    world.client.pending = [new_request(1, [1], 1)]
    world.run()
    record = json.loads(world.client.stats[-1])
    assert record["Kernel Dispatch"] == "scripted" and record["Tokens per KV cache block"] == 16


class CountingBackend(ScriptedBackend):
    answer = {"Compute Threads": np.int64(3)}

    def figures(self):
        return self.answer


def test_numbers_of_the_backend_are_in_every_record(new_request):
    pending, records = [new_request(1, [1], 3)], []
    with EngineHarness(lambda count: [pending.pop()] if pending else [], lambda *response: None, stats=records.append,
                       backend=CountingBackend()) as engine:
        for _ in range(4):
            engine.step()
    assert [json.loads(record)["Compute Threads"] for record in records] == [3] * len(records) and records


@pytest.mark.parametrize("answer", [None, {"Compute Threads": "many"}, {1: 1.5}, {"Most": 2**64}])
def test_a_backend_whose_numbers_are_none_costs_nobody_a_record(new_request, answer):
    pending, records, finals = [new_request(1, [1], 3)], [], []
    backend = CountingBackend()
    backend.answer = answer
    with EngineHarness(lambda count: [pending.pop()] if pending else [],
                       lambda number, tensors, is_final, error: finals.append(error) if is_final else None,
                       stats=records.append, backend=backend) as engine:
        for _ in range(4):
            engine.step()
    assert finals == [""] and "Failed figures Callbacks" in json.loads(records[-1])


def test_c26_no_record_and_no_error_text_holds_tokens_of_a_request(make_world, new_request):
    world = make_world(backend={"vocab_size": 987654})
    world.client.pending = [new_request(1, [987653, 987652], 3), new_request(2, [987653, 987654], 3),
                            new_request(3, [987653], 0)]
    world.run()
    said = "".join(world.client.stats) + world.client.final(2).error + world.client.final(3).error
    assert "987653" not in said.replace("0..987653", "")
