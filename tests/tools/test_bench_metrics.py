"""The metrics of a benchmark with known time stamps are right, and so is their output as lines, CSV and a table."""

import csv
import io

import numpy as np
import pytest

from batch_manager.tools.bench.client import Receipt
from batch_manager.tools.bench.load import Load
from batch_manager.tools.bench.metrics import (
    Bounds,
    arrival_window_rate,
    completion_rate,
    figures,
    summary,
    weighted_summary,
)
from batch_manager.tools.bench.summary import csv_rows, lines, original_figures, table

REQUESTS = [{"id": 1, "max_tokens": 3, "prompt": [5] * 10}, {"id": 2, "max_tokens": 4, "prompt": [5] * 6}]


def receipts():
    return {1: Receipt([7, 7, 7], [2.0, 2.5, 3.5], arrival_s=1.0, final_s=3.5, queue_s=0.25),
            2: Receipt([7], [3.0], arrival_s=0.0, final_s=3.0)}


def found(**changes):
    given = dict(streaming=True, counts_early_ends=False) | changes
    return figures(REQUESTS, receipts(), 4.0, **given)


def test_latencies_follow_from_the_stamps():
    result = found()
    assert (result["output_tok_s"], result["total_tok_s"]) == (1.0, 5.0)
    assert (result["ttft_ms_p50"], result["e2e_ms_p50"], result["itl_ms_mean"]) == (2000.0, 2750.0, 750.0)
    assert result["latency_ms"]["tpot"] == dict(avg=750.0, min=750.0, max=750.0, p50=750.0, p90=750.0, p99=750.0)
    assert result["latency_ms"]["itl"]["min"] == 500.0 and result["latency_ms"]["itl"]["max"] == 1000.0
    assert result["latency_ms"]["queue"]["avg"] == 250.0
    assert result["user_tok_s"]["avg"] == pytest.approx(1 / 0.75, abs=1e-3)
    assert (result["requests_s"], result["requested_tok_s"]) == (0.5, 1.75)


def test_prompts_of_refused_requests_are_no_throughput():
    refused = receipts() | {2: Receipt([], [], arrival_s=0.0, final_s=0.5, error="[INVALID_REQUEST] no")}
    result = figures(REQUESTS, refused, 4.0, streaming=True, counts_early_ends=False)
    assert (result["output_tok_s"], result["total_tok_s"], result["prompt_tokens"]) == (0.75, 3.25, 16)


def test_a_request_is_good_when_it_keeps_both_bounds():
    def good(**bounds):
        return found(bounds=Bounds(**bounds))["goodput"]
    assert good(ttft_ms=1500.0)["share"] == 0.5                    # 1.0 s and 3.0 s
    assert good(ttft_ms=1000.0, itl_ms=750.0) == {
        "ttft_ms": 1000.0, "itl_ms": 750.0, "e2e_ms": None, "requests_s": 0.25, "share": 0.5}
    assert good(e2e_ms=2750.0)["share"] == 0.5 and good(e2e_ms=1e4)["share"] == 1.0 and good(e2e_ms=1.0)["share"] == 0.0
    assert good(itl_ms=749.0)["share"] == 0.5                      # a single token has no time between tokens
    assert good(ttft_ms=1000.0, itl_ms=749.0)["share"] == 0.0
    assert found()["goodput"] is None


@pytest.mark.parametrize("arrivals, served, expected", [
    (10.0, 20.0, 10.0),         # requests/s that arrive and that the engine can complete, and what completes
    (10.0, 5.0, 5.0),
    (1000.0, 50.0, 50.0),
])
def test_the_rate_while_requests_arrive_is_that_of_a_queue(arrivals, served, expected):
    arrivals_s = np.arange(400) / arrivals
    finals_s = []
    for arrival in arrivals_s:          # one server, a constant time for each request
        finals_s.append(max(arrival, finals_s[-1] if finals_s else 0.0) + 1 / served)
    assert arrival_window_rate(arrivals_s, np.array(finals_s)) == pytest.approx(expected, rel=0.03)
    assert arrival_window_rate(np.zeros(4), np.ones(4)) is None
    assert arrival_window_rate(arrivals_s, np.full(400, np.nan)) == pytest.approx(0.0, abs=arrivals * 0.02)


def test_failed_requests_are_in_no_latency_and_never_good():
    given = receipts()
    given[1].error = "[QUEUE_FULL] no"
    result = figures(REQUESTS, given, 4.0, streaming=True, bounds=Bounds(ttft_ms=1e9))
    assert (result["failed"], result["wrong_length"]) == (1, 2)
    assert result["failures"] == [{"id": 1, "error": "[QUEUE_FULL] no"}]
    assert result["latency_ms"]["ttft"]["max"] == 3000.0 and result["goodput"]["share"] == 0.5
    assert result["requested_tok_s"] == 1.0


def test_an_end_id_allows_short_outputs_but_no_long_ones():
    assert found(counts_early_ends=True)["wrong_length"] == 1 and found()["wrong_length"] == 0
    short = [dict(request, max_tokens=1) for request in REQUESTS]
    assert figures(short, receipts(), 4.0, streaming=True, counts_early_ends=False)["wrong_length"] == 1


def test_without_streaming_only_the_end_is_known():
    latencies = found(streaming=False)["latency_ms"]
    assert latencies["ttft"] is latencies["itl"] is latencies["tpot"] is None and latencies["e2e"]["max"] == 3000.0


def test_percentiles_are_numpy_s():
    values = np.arange(1.0, 101.0)
    assert summary(values) == {"avg": 50.5, "min": 1.0, "max": 100.0, "p50": 50.5, "p90": 90.1, "p99": 99.01}
    assert summary(np.empty(0)) is None


def test_the_completion_rate_leaves_out_the_time_to_the_first_one():
    at = np.array([10.5, np.nan, 10.0, 11.0, 12.0])
    assert completion_rate(at) == 1.5
    assert completion_rate(at[:2]) is None and completion_rate(np.ones(3)) is None


def test_values_with_counts_have_the_summary_of_the_values_one_by_one():
    random = np.random.default_rng(0)
    for size in (1, 2, 7, 100):
        values, counts = random.random(size).round(2), random.integers(1, 9, size)
        assert weighted_summary(values, counts) == pytest.approx(summary(np.repeat(values, counts)), abs=1e-3)
    assert weighted_summary(np.empty(0), np.empty(0, int)) is None


def result_of(**changes):
    return {"n": 2, "wall_s": 4.0, "steps": 3, "concurrency": None, "request_rate": None, "mode": "offline",
            **found(), **changes}


def test_lines_and_csv_have_the_original_names_and_count_requested_tokens():
    told = original_figures(result_of())
    assert told["num_samples"] == 2 and told["total_latency(ms)"] == 4000.0
    assert told["token_throughput(token/sec)"] == 1.75 != found()["output_tok_s"]
    assert told["p90_inter_token_latency(ms)"] == 750.0 and told["min_sequence_latency(ms)"] == 2500.0
    assert told["avg_user_tokens_per_second(tokens/sec/user)"] == pytest.approx(1.333)
    printed = lines([result_of()]).splitlines()
    assert printed[0] == "[BENCHMARK] num_samples 2" and "[BENCHMARK] avg_request_queueing_latency(ms) 250.0" in printed

    file = io.StringIO()
    csv.writer(file).writerows(csv_rows([result_of()]))
    (row,) = csv.DictReader(io.StringIO(file.getvalue()))
    assert {name: str(value) for name, value in told.items()} == row

    sweep = [result_of(concurrency=1), result_of(concurrency=2, latency_ms=found(streaming=False)["latency_ms"])]
    header, first, second = csv_rows(sweep)
    assert header[:2] == ["request_rate", "concurrency"] and (first[1], second[1]) == (1, 2)
    assert second[header.index("avg_time_to_first_token(ms)")] == ""
    assert "time_to_first_token" not in lines(sweep[1:])


def test_the_table_shows_what_is_known_alone():
    assert "in the queue, ms" in table(result_of()) and "2 requests, all at once: 4.00 s" in table(result_of())
    few = table(result_of(**figures(REQUESTS, receipts(), 4.0, streaming=False, counts_early_ends=False)))
    assert "time to first token" not in few and "end to end" in few
    assert "within bounds, share" in table(result_of(**found(bounds=Bounds(ttft_ms=1.0))))


def test_a_load_says_when_requests_arrive():
    requests = [{"id": number, "arrival_s": arrival} for number, arrival in enumerate([0.0, 3.0, 1.0])]
    assert Load().arriving(requests) == requests
    assert Load().offered_rate(requests) == pytest.approx(2 / 3)
    even = Load(request_rate=4.0, delays="constant").arriving(requests)
    assert [(one["id"], one["arrival_s"]) for one in even] == [(0, 0.0), (2, 0.25), (1, 0.5)]
    for load in (Load(request_rate=0.0), Load(concurrency=2)):
        assert [one["arrival_s"] for one in load.arriving(requests)] == [0.0] * 3
        assert load.offered_rate(load.arriving(requests)) is None
    many = [{"id": number, "arrival_s": 0.0} for number in range(4000)]
    drawn = Load(request_rate=5.0, random_seed=1)
    between = np.diff([one["arrival_s"] for one in drawn.arriving(many)])
    assert between.mean() == pytest.approx(0.2, rel=0.1) and between.std() == pytest.approx(0.2, rel=0.1)
    assert drawn.arriving(many) == drawn.arriving(many)
