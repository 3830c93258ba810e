"""The engine agrees with records of scheduling and KV cache scenarios from tests of TensorRT-LLM, vLLM and SGLang.

    cases/*.json   the records: inputs, expected results, and the test and project that they come from
    adapter.py     runs the records with the engine's own classes

All results are compared, block ids up to renaming. README.md has the details.
"""

import json
from collections import Counter
from pathlib import Path

import pytest


def test_every_record_holds(adapter):
    files = sorted((Path(__file__).parent / "cases").glob("*.json"))
    records = [record for file in files for record in json.loads(file.read_text())["cases"]]
    differences = [f"{record['id']}: {difference}" for record in records for difference in run(adapter, record)[:3]]
    assert differences == []
    assert Counter(record["level"] for record in records) == {1: 268, 2: 3}


def run(adapter, record: dict) -> list[str]:
    """Run a record. Returns its differences as text."""
    kind, expected = record["type"], record["expected"]
    if kind == "scheduler_trace":
        return compare_rows(record, *trace(adapter, record))

    config = record.get("config")
    if kind == "micro_batch_step":
        found = adapter.micro_batch_step(config, record["requests"], record.get("inflight", []))
        found = {"ctx": sorted(found["ctx"]), "gen": sorted(found["gen"]),
                 "draft": {name: found["draft"][name] for name in expected["draft"]}}
        expected = expected | {"ctx": sorted(expected["ctx"]), "gen": sorted(expected["gen"])}
    elif kind == "capacity_step":
        found = adapter.capacity_step(config, record["requests"])
    elif kind == "chunking":
        found = adapter.chunk(config, record["requests"], record["iterations"])
    elif kind == "request_pause":
        found = adapter.request_pause(record["request"], record["steps"])
    elif kind == "request_order":
        found = adapter.request_order(record["requests"])
    elif kind == "draft_step":
        found = adapter.draft_step(record["requests"])
    elif kind == "ngram_proposal":
        found = adapter.ngram_proposal(config, record["tokens"])
    elif kind == "kv_fill":
        found = adapter.kv_fill(config, record["prompt_len"], record["tokens_to_add"], record["mode"])
    elif kind == "retention_map":
        found = adapter.retention_map(record["ranges"], record.get("tokens_per_block"), record.get("seq_len"))
    elif kind in ("kv_ops", "eviction_ops", "prefix_tree_ops"):
        found = getattr(adapter, kind)(config, record["ops"])
        return compare_operations(expected["results"], found["results"])
    else:
        raise AssertionError(f"a record of unknown type {kind}")
    return compare(kind, expected, found)


def compare_operations(expected: list[dict], found: list[dict]) -> list[str]:
    differences, renamed = [], {}
    for place, (want, got) in enumerate(zip(expected, found, strict=True)):
        if "block_ids" in want:
            for ours, theirs in zip(got["block_ids"], want["block_ids"], strict=True):
                if renamed.setdefault(theirs, ours) != ours or list(renamed.values()).count(ours) > 1:
                    differences.append(f"operation {place}: block {ours} for {theirs}, which is {renamed[theirs]}")
        differences += compare(f"operation {place}", drop(want, "block_ids"), got)
    return differences


def trace(adapter, record: dict) -> tuple[list[dict], int | None]:
    """Run a trace to its end. Returns (result of each iteration, number of reused blocks)."""
    engine = adapter.build(record["config"])
    to_come = sorted(record["requests"], key=lambda request: request.get("arrival", 0))
    rows = []
    for iteration in range(record.get("fixed_iterations", record["expected"]["num_iterations"] + 1)):
        while to_come and to_come[0].get("arrival", 0) <= iteration:
            adapter.submit(engine, to_come.pop(0))
        if "fixed_iterations" not in record and not to_come and not adapter.has_work(engine):
            break
        rows.append(adapter.step(engine))
    return rows, adapter.reused_blocks(engine)


def compare_rows(record: dict, rows: list[dict], reused_blocks: int | None) -> list[str]:
    expected = record["expected"]
    if len(rows) != expected["num_iterations"]:
        return [f"{len(rows)} iterations, {expected['num_iterations']} were expected"]
    differences, generation = [], []
    if reused_blocks not in (None, expected.get("reused_blocks", reused_blocks)):
        differences.append(f"{reused_blocks} blocks were reused, {expected['reused_blocks']} were expected")
    for iteration, (want, got) in enumerate(zip(expected["rows"], rows, strict=True)):
        if record.get("row_format") == "compact1":
            context, generating, paused, done, free = want
            generation = generation if generating is None else generating
            want = {"ctx": context, "gen": generation, "paused": paused, "done": done, "free_blocks": free}
        want = drop(want, "it") | {key: sorted(want[key]) for key in ("ctx", "gen", "paused", "done")}
        got = got | {key: sorted(got[key]) for key in ("ctx", "gen", "paused", "done")}
        differences += compare(f"iteration {iteration}", want, got)
    return differences


def compare(where: str, expected: dict, found: dict) -> list[str]:
    return [f"{where}: {key} is {found.get(key)}, {value} was expected"
            for key, value in expected.items() if found.get(key) != value]


def drop(mapping: dict, key: str) -> dict:
    return {name: value for name, value in mapping.items() if name != key}


@pytest.mark.parametrize("state, fits, runs", [
    ("DISAGG_GENERATION_INIT", True, None), ("DISAGG_GENERATION_TRANS_IN_PROGRESS", False, None),
    ("DISAGG_CONTEXT_INIT_AND_TRANS", True, "ctx"), ("DISAGG_GENERATION_TRANS_COMPLETE", True, "gen"),
    ("DISAGG_CONTEXT_TRANS_IN_PROGRESS", False, None), ("DISAGG_CONTEXT_COMPLETE", False, None),
    ("DISAGG_TRANS_ERROR", False, None)])
def test_states_of_transfers_are_read(adapter, state, fits, runs):
    """A request that waits for blocks takes room in the pool and runs in no step; one that sends them has ended."""
    made = [{"id": 0, "prompt_len": 10, "max_new_tokens": 10, "state": state, "generated": 0},
            {"id": 1, "prompt_len": 10, "max_new_tokens": 10}]
    for policy in ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT"):
        found = adapter.capacity_step({"capacity_policy": policy, "max_num_requests": 4, "free_blocks": 10,
                                       "blocks_per_request": 5}, made)
        assert found == {"fitting": [0, 1] if fits else [1], "paused": []}
    step = adapter.micro_batch_step({"max_batch_size": 4}, made, [])
    assert [id for id, _ in step["ctx"]] == ([0, 1] if runs == "ctx" else [1])
    assert step["gen"] == ([0] if runs == "gen" else [])
