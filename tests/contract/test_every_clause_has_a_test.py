"""The table of the contract's clauses: each is named by tests, in their name (`test_c7_...`) or in a docstring."""

import ast
import functools
import pathlib
import re
from collections import defaultdict

import pytest

TESTS = pathlib.Path(__file__).parents[1]

CLAUSES = {
    1: "one final for every accepted request, nothing after it",
    2: "every item handed over is accepted, refused with a text, or counted",
    3: "the id of a living request is refused, the living one untouched",
    4: "from inside the final callback on the id is free",
    5: "when the final callback runs, blocks and slot are free",
    6: "a stop ends who is alive at the poll, in that iteration",
    7: "type, shape, bytes, copy, values; the copy runs",
    8: "what the pool could never hold is refused at once",
    9: "GUARANTEED_NO_EVICT never pauses what it started",
    10: "MAX_UTILIZATION pauses the youngest, and changes latency only",
    11: "allocation is all or nothing, and the blocks add up",
    12: "block reuse within one domain, of finished steps, compared token by token",
    13: "a result depends on request, weights and seed only",
    14: "shutdown drains or answers, is idempotent, and only asks from inside a callback",
    15: "whatever a callback raises is contained, counted and logged once a second",
    16: "no public method waits for the worker with a lock held",
    17: "with blocks, the last reference and interpreter exit end with finals",
    18: "no signal handlers, global settings or output; a fork's copy is inert",
    19: "a worker without a heartbeat is reported, not killed",
    20: "bounds by default, QUEUE_FULL beyond them",
    21: "a failing step is narrowed to who fails alone",
    22: "idle costs little, a request is picked up within 5 ms",
    23: "threads, files, blocks and tensors are back after shutdown",
    24: "no pickle, eval, network or undocumented environment variable",
    25: "safetensors and JSON only, checked",
    26: "no tokens in texts, logs and statistics; control characters escaped",
}


def clauses_in(text: str | None) -> set[int]:
    return {int(number) for number in re.findall(r"\bC(\d{1,2})\b", text or "")}


@functools.cache
def named_in() -> dict[int, list[str]]:
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == pathlib.Path(__file__):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_the_file = clauses_in(ast.get_docstring(tree))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                in_its_name = {int(number) for number in re.findall(r"_c(\d{1,2})(?=_)", node.name)}
                for clause in (in_its_name | clauses_in(ast.get_docstring(node))) or of_the_file:
                    found[clause].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: f"C{clause}: {CLAUSES[clause]}")
def test_a_test_names_the_clause(clause):
    assert named_in()[clause], f"no test names C{clause}: {CLAUSES[clause]}"


def test_no_test_names_a_clause_that_does_not_exist():
    unknown = {clause: tests for clause, tests in named_in().items() if clause not in CLAUSES}
    assert not unknown
