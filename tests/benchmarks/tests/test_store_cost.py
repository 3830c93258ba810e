"""The program that measures what a prompt cache on disk costs prints what it says."""

import json

import pytest

pytest.importorskip("torch")

from tests.benchmarks import store_cost  # noqa: E402


def test_the_program_prints_three_ratios(capsys):
    store_cost.main(["--shape", "tiny", "--rounds", "1", "--requests", "2", "--prompt", "320", "--output", "40",
                     "--streams", "2", "--arrivals", "2", "--every", "0.01", "--host-bytes", "16777216"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratios"].keys() == {"tokens per second", "processor time", "p99 between tokens"}
    assert all(0.01 < ratio < 100 for ratio in result["ratios"].values())
