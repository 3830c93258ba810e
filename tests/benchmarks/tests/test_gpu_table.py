"""docs/performance.md shows the newest GPU report, or says that no GPU was measured."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import gpu_results, gpu_table
from tests.benchmarks.gpu_report.records import FAILED, Record
from tests.benchmarks.gpu_table import BEGIN, END, NOT_MEASURED, main, text_of, written_into

HEADER = {"device": "some GPU", "versions": {"torch": "2.11"}, "commit": "abc1234", "date": "2026-12-01T10:00:00Z"}


def lines(*records, dry=False, **header):
    return [record.line(HEADER | header, dry=dry) for record in records]


def write(path, found):
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return path


def test_the_page_is_what_the_command_writes():
    assert main(["--check"]) == 0


def test_without_a_result_it_says_so():
    page = written_into(f"a\n{BEGIN}\nold\n{END}\nb\n", text_of([]))
    assert page == f"a\n{BEGIN}\n{NOT_MEASURED}\n{END}\nb\n"
    with pytest.raises(ValueError, match="has no lines"):
        written_into("a page without them", NOT_MEASURED)


def test_a_result_becomes_a_table():
    text = text_of(lines(
        Record("correctness", "rms_norm", 0.001, 0.01), Record("correctness", "philox", status=FAILED, note="wrong"),
        Record("G1", "uniform", 3700.0, 4300.0, "GB/s"), Record("G4", "eager", 500.0, 20.0, "us"),
        Record("G9", "all", status=FAILED, note="no memory"), Record("fact", "kernels", 290.0)))
    assert "some GPU, torch 2.11, commit `abc1234`" in text
    assert "1 kernels were right by value; wrong or not reached: philox." in text
    rows = {row.split(" | ")[0]: row for row in text.splitlines() if row.startswith("| G")}
    assert rows["| G1"].endswith("| uniform | 3,700 GB/s | 4,300 | 0.8605 | 0.9 | no |")
    assert rows["| G4"].endswith("| eager | 500 us | 20 | 25 | 1 | no |")
    assert rows["| G9"].endswith("| all (no memory) | - | - | - | 0.5 | failed |")
    assert "kernels | 290" not in text


def test_the_newest_result_counts_and_a_dry_run_is_none(tmp_path, monkeypatch, capsys):
    store = tmp_path / "results"
    store.mkdir()
    old = write(tmp_path / "old", lines(Record("G1", "uniform", 1.0, 2.0), date="2026-11-30T10:00:00Z"))
    new = write(tmp_path / "new", lines(Record("G1", "uniform", 3.0, 2.0)))
    gpu_results.add(new, store)
    gpu_results.add(old, store)
    assert sorted(path.name for path in store.iterdir()) == [
        "2026-11-30T10-00-00Z-some-GPU.jsonl", "2026-12-01T10-00-00Z-some-GPU.jsonl"]
    assert gpu_results.newest(store)[0]["ratio"] == 1.5
    with pytest.raises(ValueError, match="not a dry run"):
        gpu_results.add(write(tmp_path / "dry", lines(Record("G1", "uniform", 1.0, 2.0), dry=True)), store)
    for commit in ("unknown", "abc+"):
        with pytest.raises(ValueError, match="expected a known commit"):
            gpu_results.add(write(tmp_path / "dirty", lines(Record("G1", "uniform", 1.0, 2.0), commit=commit)), store)

    page = tmp_path / "performance.md"
    page.write_text(f"{BEGIN}\n{NOT_MEASURED}\n{END}\n")
    monkeypatch.setattr(gpu_table, "newest", lambda: gpu_results.newest(store))
    assert main(["--page", str(page), "--check"]) == 1
    assert "differs from the newest" in capsys.readouterr().err and NOT_MEASURED in page.read_text()
    assert main(["--page", str(page)]) == 0
    assert "| 1.5 | 0.9 | yes |" in page.read_text()
    assert main(["--page", str(page), "--check"]) == 0


def test_the_results_of_the_package_are_reports():
    for path in Path(gpu_results.FOLDER).glob("*.jsonl"):
        gpu_results.read(path)
