import json

import pytest

from tests.benchmarks import async_streams


@pytest.mark.parametrize("options", [["--step-ms", "0"], ["--step-ms", "1"], ["--step-ms", "1", "--process"]])
def test_the_program_prints_a_line_of_json_for_each_pair_of_runs(capsys, options):
    assert async_streams.main(["--streams", "3", "--tokens", "5", "--runs", "2", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line.keys() == {"us_per_token", "counting_us", "late_ms_p99", "delivery_ms_p99", "wake_ups",
                               "iterations"}
        assert 5 <= line["iterations"] <= 15 and 0 <= line["wake_ups"] <= line["iterations"]
        assert (line["counting_us"] == 0) == ("--process" in options)
