"""The benchmark of the deterministic mode or of an FP8 cache writes a record of each setting, and runs both in turn."""

import json
import time
from pathlib import Path

import pytest

from tests.benchmarks.deterministic import in_turn, main

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "austen-4m"


@pytest.mark.parametrize("options", [[], ["--sample"], ["--penalty"], ["--report"], ["--fp8-cache"]])
def test_a_record_for_every_setting(capsys, options):
    main(["--model", str(SHIPPED), "--load-format", "dummy", "--threads", "1", "--batch", "1", "2", "--context", "4",
          "--prefill", "9", "--steps", "2", *options])
    *lines, record = capsys.readouterr().out.splitlines()
    results = json.loads(record)["results"]
    assert [(row["what"], row["batch"], row["context"]) for row in results] == [
        ("generation", 1, 4), ("generation", 2, 4), ("context", 1, 9)]
    assert len(lines) == 2 + len(results)
    assert all(row["ratio"] == row["changed_ms"] / row["normal_ms"] > 0 for row in results)


def test_both_modes_take_turns_and_warming_up_does_not_count():
    calls = []
    figures = in_turn(lambda: calls.append("normal"), lambda: calls.append("deterministic"), 3, time.perf_counter)
    assert calls == ["normal", "deterministic"] * 5
    assert figures["normal_best_ms"] <= figures["normal_ms"]
