"""Scheduling and KV cache facts recorded from the tests of TensorRT-LLM, vLLM and SGLang.

    cases/*.json   the records: what goes in, what has to come out, and which test of which project says so
    adapter.py     lets them drive the real classes

What is not built yet stands in one table below, with the number of records that wait for it.
"""

import json
from collections import Counter
from pathlib import Path

RECORDS_THAT_HOLD = 184
NOT_SUPPORTED_YET = {
    "adapter pages": 8,
    "attention window": 7,
    "beams in the block tables": 13,
    "block reuse": 13,
    "eviction priorities": 3,
    "prefix tree": 4,
    "retention priorities": 7,
    "reuse credit": 3,
    "rewinding": 1,
}
WITHOUT_ADAPTER = {"eviction_ops": "eviction priorities", "prefix_tree_ops": "prefix tree",
                   "retention_map": "retention priorities"}


def test_every_record_holds_or_waits_for_a_part_named_here(adapter):
    outcomes, differences = Counter(), []
    for record in records(level=1):
        try:
            found = run(adapter, record)
        except adapter.NotSupportedError as missing:
            outcomes[str(missing)] += 1
            continue
        outcomes["different" if found else "holds"] += 1
        differences += [f"{record['id']}: {difference}" for difference in found[:3]]
    assert differences == []
    assert outcomes == {"holds": RECORDS_THAT_HOLD, **NOT_SUPPORTED_YET}


def records(level: int) -> list[dict]:
    files = sorted((Path(__file__).parent / "cases").glob("*.json"))
    return [record for file in files for record in json.loads(file.read_text())["cases"] if record["level"] <= level]


def run(adapter, record: dict) -> list[str]:
    """What came out differently, in words."""
    kind, expected = record["type"], record["expected"]
    if kind in WITHOUT_ADAPTER:
        raise adapter.NotSupportedError(WITHOUT_ADAPTER[kind])
    if kind == "scheduler_trace":
        return compare_rows(record, trace(adapter, record))

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
    elif kind == "request_order":
        found = adapter.request_order(record["requests"])
    elif kind == "kv_fill":
        found = adapter.kv_fill(config, record["prompt_len"], record["tokens_to_add"], record["mode"])
    elif kind == "kv_ops":
        results = adapter.kv_ops(config, record["ops"])["results"]
        assert len(results) == len(expected["results"])
        return [difference for place, (want, got) in enumerate(zip(expected["results"], results, strict=True))
                for difference in compare(f"operation {place}", drop(want, "block_ids"), got)]
    else:
        raise AssertionError(f"a record of unknown type {kind}")
    return compare(kind, expected, found)


def trace(adapter, record: dict) -> list[dict]:
    """The rows of a whole run."""
    engine = adapter.build(record["config"])
    to_come = sorted(record["requests"], key=lambda request: request.get("arrival", 0))
    rows = []
    for iteration in range(record.get("fixed_iterations", record["expected"]["num_iterations"] + 1)):
        while to_come and to_come[0].get("arrival", 0) <= iteration:
            adapter.submit(engine, to_come.pop(0))
        if "fixed_iterations" not in record and not to_come and not adapter.has_work(engine):
            break
        rows.append(adapter.step(engine))
    return rows


def compare_rows(record: dict, rows: list[dict]) -> list[str]:
    expected = record["expected"]
    if len(rows) != expected["num_iterations"] or expected.get("reused_blocks"):
        return [f"{len(rows)} iterations, {expected['num_iterations']} were expected"]
    differences, generation = [], []
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
