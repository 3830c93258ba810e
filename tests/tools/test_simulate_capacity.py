"""Searches of `batch-manager simulate` find the rate and the number of replicas that queueing theory gives."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batch_manager.tools.bench.load import Load
from batch_manager.tools.bench.metrics import arrival_window_rate
from batch_manager.tools.bench.result import read_result
from batch_manager.tools.bench.saturation import SUSTAINED_SHARE
from batch_manager.tools.simulate.__main__ import main
from batch_manager.tools.simulate.capacity import find_fewest_replicas, probed_traffic
from batch_manager.tools.simulate.engine_settings import EngineSettings
from batch_manager.tools.simulate.figures import stamps_of
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.simulate.traffic import PromptMaker, Traffic
from tests.tools.simulated import lengths
from tests.tools.test_simulate import PLAIN

SERVICE_S = 0.002 + 0.020 + 100 * 0.0001 + 9 * (0.002 + 0.010 + 0.001)      # of each request, one at a time

@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replace(PLAIN, about={"num_blocks": 100, "tokens_per_block": 16}).write(tmp_path / "cost.json")
    (tmp_path / "w.jsonl").write_text("".join(
        json.dumps({"timestamp": 100 * n, "input_length": 100, "output_length": 10, "hash_ids": []}) + "\n"
        for n in range(300)))
    return lambda *more: main(["--cost", "cost.json", "--workload", "w.jsonl", "--max-batch-size", "1",
                               "--tokens-per-block", "16", "--out", "found.json", *more])


def test_the_highest_rate_is_that_of_the_service_time(call, capsys):
    assert call("--find-saturation", "--max-probes", "30") == 0
    found = read_result(Path("found.json"))
    sustained, broken = found["saturation"]["sustained"], found["saturation"]["broken"]
    assert 1 / SERVICE_S * 0.95 <= sustained < 1 / SERVICE_S / 0.95 * 1.02 and sustained < broken < 1.05 * sustained
    assert [point["sustained"] for point in found["points"] if point["settings"]["request_rate"] == sustained] == [True]
    assert f"{sustained:.4g} requests/s are sustained" in capsys.readouterr().out


@pytest.mark.parametrize("count, batch, replicas", [(40, 8, 1), (100, 4, 1), (90, 2, 3)])
def test_the_rate_is_completed_by_a_run_ten_times_as_long(call, count, batch, replicas):
    """Outputs of 1 to 800 tokens. Poisson arrivals, or one repetition, gave rates that are completed at 0.66."""
    random = np.random.default_rng(count)
    inputs, outputs = (np.clip(random.lognormal(mean, 1.5, count), 1, 800).astype(int) for mean in (4, 2))
    Path("w.jsonl").write_text("".join(
        json.dumps({"timestamp": 0, "input_length": int(one), "output_length": int(two), "hash_ids": []}) + "\n"
        for one, two in zip(inputs, outputs, strict=True)))
    settings = ("--max-tokens-in-paged-kvcache", "64000", "--max-batch-size", str(batch), "--replicas", str(replicas))
    assert call("--find-saturation", "--max-probes", "5", *settings) == 0
    found = read_result(Path("found.json"))
    rate, (at_once, *points) = found["saturation"]["sustained"], found["points"]
    number = 10 * points[0]["n"] // count
    stamps = stamps_of(simulate(
        lengths(np.arange(number * count) / rate, np.tile(inputs, number), np.tile(outputs, number)),
        EngineSettings(num_blocks=4000, max_seq_len=1600, tokens_per_block=16, max_batch_size=batch), PLAIN,
        num_replicas=replicas))
    assert arrival_window_rate(stamps.arrival_s, stamps.final_s) / rate >= SUSTAINED_SHARE - 0.005
    assert rate > SUSTAINED_SHARE * at_once["requests_s"]
    assert all(point["delays"] == "constant" and point["n"] == points[0]["n"] for point in points)


def test_a_bound_lowers_the_rate(call):
    found = []
    share = ("--slo-share", "0.99")
    for more in ((), ("--slo-ttft-ms", "40", *share), ("--slo-e2e-ms", "100", *share)):
        assert call("--find-saturation", "--max-probes", "7", *more) == 0
        found.append(read_result(Path("found.json"))["saturation"]["sustained"])
    # A prompt takes 32 ms alone, so that no request may wait longer than 8 ms; an answer takes 149 ms in any case.
    assert found[1] <= 1 / SERVICE_S < found[0] * 1.001 and found[2] is None


@pytest.mark.parametrize("rate", [5.0, 50.0])
def test_the_fewest_replicas_are_the_load_rounded_up(call, rate):
    assert call("--find-replicas", "--request-rate", str(rate), "--slo-ttft-ms", "40",
                "--slo-share", "0.99") == 0
    assert read_result(Path("found.json"))["capacity"]["sustained"] == int(np.ceil(rate * SERVICE_S))


def test_replicas_for_recorded_times(call):
    assert call("--find-replicas", "--slo-ttft-ms", "40", "--slo-share", "0.99") == 0       # 10 requests/s
    assert read_result(Path("found.json"))["capacity"]["sustained"] == int(np.ceil(10 * SERVICE_S))


def test_recorded_times_are_repeated_until_the_quarters_of_a_run_are_alike():
    """All work arrives in the first half, so that the second half of one repetition would seem sustained."""
    times = np.concatenate([np.arange(60) * 0.1, 6 + np.arange(20) * 0.3])
    traffic = lengths(times, np.full(80, 50), np.where(np.arange(80) < 60, 50, 1))
    probed = probed_traffic(traffic, Load(), 1, 8)
    assert len(probed) == 4 * 80 and np.all(np.diff(probed.arrival_s) > 0)
    assert np.allclose(probed.arrival_s[80:160] - times, times[-1] * 80 / 79)
    assert np.array_equal(probed.output_tokens, np.tile(traffic.output_tokens, 4))


@pytest.mark.parametrize("search", [("--find-saturation",), ("--find-replicas", "--request-rate", "2")])
def test_a_search_has_constant_intervals(call, search, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(*search, "--delays", "exponential")
    assert f"--delays is exponential and {search[0]} was given" in capsys.readouterr().err


@pytest.mark.parametrize("first", [1, 7])
def test_a_search_finds_every_number(first):
    for fewest in range(1, 60):
        asked: list[int] = []

        def holds(number, asked=asked, fewest=fewest):
            asked.append(number)
            return number >= fewest

        found = find_fewest_replicas(holds, first, 50, 20, "")
        assert found.sustained == (fewest if fewest <= 50 else None) and found.probes == len(asked) <= 14
        assert max(asked) <= 50 and len(set(asked)) == len(asked)


def rows_of_the_requests():
    with open("each.csv") as file:
        return list(csv.DictReader(file))


def test_the_latencies_of_each_request_are_those_of_the_result(call):
    assert call("--delays", "constant", "--sweep", "request_rate=6,7", "--requests-csv", "each.csv", "--replicas",
                "2") == 0
    rows = rows_of_the_requests()
    assert [int(row["id"]) for row in rows] == [*range(300)] * 2 and {row["replica"] for row in rows} == {"0", "1"}
    for number, point in enumerate(read_result(Path("found.json"))["points"], 1):
        own = [row for row in rows if row["run"] == str(number)]
        assert {float(row["request_rate"]) for row in own} == {point["request_rate"]}
        for name in ("ttft", "e2e"):
            values = [float(row[f"{name}_ms"]) for row in own]
            assert np.percentile(values, 99) == pytest.approx(point[f"{name}_ms_p99"], abs=2e-3)
    assert all(float(row["e2e_ms"]) >= 1e3 * SERVICE_S - 1e-2 and row["error"] == "" for row in rows)


def test_a_failed_request_has_its_error_and_no_latency(call):
    assert call("--max-seq-len", "90", "--requests-csv", "each.csv", "--report", "none") == 1
    row = rows_of_the_requests()[0]
    assert "max_seq_len - 1 = 89" in row["error"] and row["ttft_ms"] == row["e2e_ms"] == ""


def test_repeated_traffic_shares_prefixes_within_a_repetition_only():
    inputs, prefixes = np.array([600, 700]), [(3,), (3,)]
    traffic = Traffic(np.zeros(2), inputs, np.array([1, 2]), PromptMaker(inputs, prefixes), prefixes=prefixes)
    twice = traffic.repeated(2, np.arange(4.0))
    first = [twice.prompt(index)[:512].tolist() for index in range(4)]
    assert first[0] == first[1] != first[2] == first[3] and twice.output_tokens.tolist() == [1, 2, 1, 2]
    assert [len(twice.prompt(index)) for index in range(4)] == [600, 700, 600, 700]
