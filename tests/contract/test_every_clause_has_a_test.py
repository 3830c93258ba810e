"""Each clause of docs/contract.md is cited by a test, in its name (`test_c7_...`) or in a docstring."""

import ast
import functools
import pathlib
import re
from collections import defaultdict

import pytest

from tests.structure.documents import cited_in_text, clauses

TESTS = pathlib.Path(__file__).parents[1]

CLAUSES = clauses()


def clauses_in(text: str | None) -> set[int]:
    return {int(number[1:]) for number in cited_in_text(text or "") if number.startswith("C")}


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
