"""The engine agrees with a plain model of the rules of the conformance records, on random records of each type.

    schema_oracle.py     the model
    schema_cases.py      seed -> record
    schema_compare.py    finds differences and shrinks records

tests/campaigns/schema_differential.py runs more seeds. README.md of this folder lists the deliberate differences.
Records on which a deliberate difference has an effect are counted as not compared.
"""

import json
from pathlib import Path

import pytest

from . import schema_oracle
from .schema_cases import KINDS, make_case
from .schema_compare import NotCompared, differences, shrink

SEEDS = {"trace_like_the_records": 35, "trace_of_chunks_and_priorities": 40, "trace_of_odd_sizes": 60,
         "trace_with_reuse": 70, "kv_fill": 60, "kv_reuse": 120}
RECORDS = Path(__file__).parent / "cases"


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_follows_the_rules(adapter, kind):
    not_compared, seeds = 0, range(SEEDS.get(kind, 150))
    for seed in seeds:
        case = make_case(kind, seed)
        try:
            found = differences(adapter, case)
        except NotCompared:
            not_compared += 1
            continue
        assert not found, f"seed {seed}: {found[:3]}\n{json.dumps(shrink(adapter, case))}"
    assert not_compared <= len(seeds) // 10, "most random records say something"


def test_the_model_follows_the_records():
    """The model agrees with the recorded results of cache operations and single steps."""
    for name in ("kv_alloc", "kv_beam", "kv_reuse", "kv_window", "eviction", "chunking_fcfs", "microbatch_budget"):
        for record in json.loads((RECORDS / f"{name}.json").read_text())["cases"]:
            expected = record["expected"]
            if record["type"] == "kv_ops":
                found = schema_oracle.kv_ops(record["config"], record["ops"])["results"]
                for want, got in zip(expected["results"], found, strict=True):
                    assert {key: got[key] for key in want if key != "block_ids"} == {
                        key: value for key, value in want.items() if key != "block_ids"}, record["id"]
            elif record["type"] == "chunking":
                assert schema_oracle.chunk(record["config"], record["requests"], record["iterations"]) == expected
            elif record["type"] == "micro_batch_step":
                found = schema_oracle.micro_batch_step(record["config"], record["requests"], record.get("inflight", []))
                assert (sorted(found["ctx"]), sorted(found["gen"])) == (expected["ctx"], expected["gen"]), record["id"]
