"""The list of uncovered branches is valid, and its check finds missing and outdated entries."""

from pathlib import Path

from tests.campaigns.branch_coverage import Missing, judge, missing_branches

from .branches import CORE, UNTAKEN, Untaken

ROOT = Path(__file__).parents[2]


def test_what_is_measured_is_there():
    for path, tests in CORE.items():
        assert (ROOT / path).exists() and tests and all((ROOT / test).exists() for test in tests), path


def test_a_listed_branch_has_its_lines_and_a_reason():
    for one in UNTAKEN:
        lines = [line.strip() for line in (ROOT / one.file).read_text().splitlines()]
        assert any(Path(one.file).is_relative_to(path) for path in CORE), one
        assert one.source in lines and (not one.target or one.target in lines), one
        assert len(one.reason.split()) > 3, one


def test_a_branch_is_wrong_that_is_neither_taken_nor_listed_and_one_that_is_both():
    gap = Missing("a.py", 3, 5, "if true:", "return 1")
    listed = Untaken("a.py", "if true:", "return 1", "cannot be")
    assert judge([], ()) == judge([gap], (listed,)) == []
    assert judge([gap], ()) == ["a.py:3: 'if true:' never goes on to line 5: return 1"]
    assert "is listed and was taken" in judge([], (listed,))[0]


def test_a_report_is_read_with_the_text_of_its_lines():
    report = {"files": {"batch_manager/kv/window.py": {"missing_branches": [[1, -1], [1, 2]]}}}
    first, second = missing_branches(report)
    assert first.target == "" and str(first).endswith("never goes on to the end of the function")
    assert second.line == 1 and second.source.startswith('"""The attention window')
