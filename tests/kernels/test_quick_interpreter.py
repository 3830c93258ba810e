"""tests/quick_interpreter.py gives the results and errors of Triton's interpreter, and reports overflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OVERFLOWS = {f"{time} {name} 8" for time in ("first", "second") for name in (
    "_add torch.int32 2147483647 1", "_multiply torch.int32 2147483647 1", "_multiply torch.int32 -2147483647 -1",
    "_multiply torch.int32 46341 2")}


def outcomes(*quick):
    done = subprocess.run(
        [sys.executable, "-m", *quick, "tests.kernels.interpreted_samples"], cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_kernels_give_the_same_results_and_errors():
    pytest.importorskip("triton", reason="triton is not installed")
    plain, quick = outcomes(), outcomes("tests.quick_interpreter")
    assert {name for name, outcome in quick.items() if "OverflowError" in outcome} == OVERFLOWS
    assert len(plain) > 100 and sum(isinstance(outcome, str) for outcome in plain.values()) > 30
    for name in plain.keys() - OVERFLOWS:
        assert repr(plain[name]) == repr(quick[name]), name             # with the signs of zeros, and NaN
