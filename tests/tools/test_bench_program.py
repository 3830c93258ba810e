"""The benchmark program makes the right files from its arguments, also after failures and interruptions.

The arguments request sweeps of the load, searches for the saturation and emulated static batches, among others.
"""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from batch_manager import Parts
from batch_manager.stats.trace import read_trace
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench import __main__ as program
from batch_manager.tools.bench import measurement as measuring
from batch_manager.tools.bench import run as serving
from batch_manager.tools.bench.errors import BenchmarkError, InputError
from batch_manager.tools.bench.gate import Gate
from batch_manager.tools.bench.load import Load
from batch_manager.tools.bench.measurement import Measurement
from batch_manager.tools.bench.metrics import Bounds, arrival_window_rate
from batch_manager.tools.bench.options import parse_options
from batch_manager.tools.bench.request_options import RequestOptions
from batch_manager.tools.bench.result import FORMAT_VERSION, read_result
from batch_manager.tools.bench.saturation import SUSTAINED_SHARE, find_saturation, is_sustained, repetitions
from batch_manager.tools.bench.summary import load_words
from batch_manager.tools.request_spans import CLIENT, lives
from batch_manager.tools.workload import Lengths, make_workload
from tests.harness import forked

TEN = make_workload(count=10, vocab_size=1000, prompts=Lengths(20, 0.5, 4, 60), outputs=Lengths(6, 0.5, 2, 12))
LONG = make_workload(count=4, vocab_size=1000, prompts=Lengths(8, 0.1, 4, 9), outputs=Lengths(300, 0.1, 200, 400))

# The program with a scripted backend, in its own process.
SCRIPTED = """
import sys
from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench import __main__ as program, measurement, run

def scripted(options, workload, parts, **more):
    backend = ScriptedBackend(num_blocks=256, tokens_per_block=8, step_seconds=0.05)
    return Session(options, workload, Parts(backend=backend), **more)

run.vocabulary_of = lambda options: 1000
Session, measurement.Session = measurement.Session, scripted
print("ready", flush=True)
sys.exit(program.main(sys.argv[1:]))
"""


@pytest.fixture
def setting(tmp_path, monkeypatch):
    """Return (function that runs the benchmark program with arguments, folder of its files).

    The engine has a scripted backend and a workload of ten requests.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("ten.json").write_text(json.dumps(TEN))
    session = measuring.Session

    def scripted(options, workload, parts, **more):
        backend = ScriptedBackend(num_blocks=64, tokens_per_block=8, step_seconds=scripted.step_seconds)
        return session(options, workload, Parts(backend=backend), **more)
    scripted.step_seconds = 0.0
    monkeypatch.setattr(measuring, "Session", scripted)
    monkeypatch.setattr(serving, "vocabulary_of", lambda options: 1000)

    def run(*arguments, workload="ten.json", step_seconds=0.0):
        scripted.step_seconds = step_seconds
        return program.main(["--model", "none", "--workload", workload, "--max-batch-size", "4", "--tokens-per-block",
                             "8",
                             "--quiet", *arguments])
    return run, tmp_path


def test_files_and_a_table(setting, capsys):
    run, folder = setting
    assert run("--out", "r.json", "--output_csv", "t.csv", "--responses_json_file", "a.json", "--queue-times",
               "--slo-ttft-ms", "60000") == 0
    result = read_result(folder / "r.json")
    assert (result["kind"], result["n"], result["failed"], result["mode"]) == ("run", 10, 0, "offline")
    assert result["command"][:2] == ["--model", "none"] and result["machine"]["cores"] and result["packages"]["numpy"]
    assert result["machine"]["device"] == "none" and result["machine"]["memory_gib"] > 0
    assert result["latency_ms"]["queue"]["max"] >= result["latency_ms"]["queue"]["min"] >= 0
    assert result["goodput"]["share"] == 1.0
    (row,) = csv.DictReader(open("t.csv", newline=""))
    assert row["num_samples"] == "10" and float(row["avg_request_queueing_latency(ms)"]) >= 0
    answers = json.loads(Path("a.json").read_text())
    for answer, request in zip(answers, TEN["requests"], strict=True):
        assert answer["output_ids"] == ScriptedBackend.expected_tokens(request["prompt"], request["max_tokens"])
    printed = capsys.readouterr()
    assert "time to first token, ms" in printed.out and not printed.err
    assert not list(folder.glob("*.part"))


def test_drafts_by_place(setting, capsys):
    run, folder = setting
    text = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    requests = [{**request, "prompt": text, "max_tokens": 8} for request in TEN["requests"]]
    Path("repeating.json").write_text(json.dumps({**TEN, "requests": requests}))
    assert run("--out", "r.json", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}',
               workload="repeating.json") == 0
    result = read_result(folder / "r.json")
    assert result["speculative_config"]["num_speculative_tokens"] == 3
    drafts = result["drafts"]
    assert drafts["tokens"] >= drafts["sequences"] >= 0 and len(drafts["accepted_at"]) == 3
    assert sum(drafts["accepted_at"]) <= drafts["tokens"] and "accepted at place" in capsys.readouterr().out


def test_synthetic_acceptance_by_place(setting, capsys):
    """The first draft of a step is always right, the third one never. No output differs from that without drafts."""
    run, folder = setting
    assert run("--out", "r.json", "--synthetic-acceptance", "1,0.5,0", "--sweep", "concurrency=1,2") == 0
    result = read_result(folder / "r.json")
    assert result["synthetic_acceptance"] == [1, 0.5, 0] and len(result["points"]) == 2
    for point in result["points"]:
        drafts = point["drafts"]
        assert drafts["different_outputs"] == 0 and drafts["tokens"] > drafts["sequences"] > 5
        first, second, third = drafts["accepted_at"]
        assert first == drafts["sequences"] > second > 0 == third
    assert run("--synthetic-acceptance", "0.8") == 0
    assert any(line.split() == ["other", "outputs", "than", "without", "drafts", "0"]
               for line in capsys.readouterr().out.splitlines())


def test_lines_of_the_original(setting, capsys):
    run, _ = setting
    assert run("--report", "lines", "--no-streaming") == 0
    told = dict(line.split()[1:] for line in capsys.readouterr().out.splitlines())
    assert told["num_samples"] == "10" and told["num_error_samples"] == "0"
    assert float(told["avg_sequence_latency(ms)"]) > 0
    assert "avg_time_to_first_token(ms)" not in told


def test_responses_without_streaming_may_have_their_prompts_and_beams(setting):
    run, _ = setting
    assert run("--no-streaming", "--exclude_input_in_output_seq=false", "--responses-json-file", "a.json",
               "--num-requests", "3", "--max-input-tokens", "5") == 0
    answers = json.loads(Path("a.json").read_text())
    assert [answer["output_ids"][:5] for answer in answers] == [one["prompt"][:5] for one in TEN["requests"][:3]]
    assert [len(one["output_ids"]) for one in answers] == [min(len(one["prompt"]), 5) + one["max_tokens"]
                                                           for one in TEN["requests"][:3]]
    assert run("--beam-width", "2", "--out", "r.json") == 0
    result = read_result(Path("r.json"))
    assert (result["wrong_length"], result["output_tokens"]) == (0, TEN["output_tokens"])


@pytest.mark.parametrize("more", [["--type", "V1"], ["--block-reuse"], ["--enable_trt_overlap"],
                                  ["--return_generation_logits"], ["--return_context_logits", "--no-streaming"]])
def test_options_of_the_engine_and_of_requests(setting, more):
    run, _ = setting
    assert run("--out", "r.json", *more) == 0
    assert read_result(Path("r.json"))["output_tokens"] == TEN["output_tokens"]


def test_a_sweep_of_the_concurrency_loads_once(setting, capsys):
    run, _ = setting
    assert run("--sweep", "concurrency=1,4", "--out", "s.json", "--block-reuse", "--output-csv", "t.csv",
               step_seconds=0.002) == 0
    result = read_result(Path("s.json"))
    assert (result["kind"], result["swept"]) == ("sweep", "concurrency")
    alone, together = result["points"]
    assert (alone["concurrency"], together["concurrency"]) == (1, 4)
    assert alone["output_tokens"] == together["output_tokens"] == TEN["output_tokens"]
    assert alone["steps"] > together["steps"]
    assert alone["first_tokens"] == together["first_tokens"]
    table = capsys.readouterr().out.splitlines()
    assert table[1].startswith("concurrency 1") and table[2].startswith("concurrency 4")
    assert len(list(csv.reader(open("t.csv", newline="")))) == 3


def measured(workload, *more):
    """Measure a workload. Returns [(served workload, statistics records of its iterations)], one for each run."""
    options = parse_options(["--model", "none", "--workload", "ten.json", "--tokens-per-block", "8", "--quiet", *more])
    options.keep_stats = True
    measurement = Measurement(options, workload)
    measurement.run()
    return [(served, [json.loads(record) for record in served.records]) for served in measurement.served]


def test_no_serving_of_a_sweep_finds_what_another_one_cached(setting):
    same = make_workload(count=4, vocab_size=1000, prompts=Lengths(40, 0.1, 30, 50, fixed=40),
                         outputs=Lengths(3, 0.1, 2, 4, fixed=3), shared_prefix=24)
    runs = measured(same, "--block-reuse", "--sweep", "concurrency=1,2", "--max-batch-size", "4")
    first, both = (records[-1]["Cache Hit Tokens"] for _, records in runs)
    assert first == 3 * 24 and first < both <= 2 * first        # requests that start together share nothing


def test_requests_of_a_closed_loop_follow_each_other(setting):
    ((served, records),) = measured(TEN, "--concurrency", "3")
    assert max(record["Active Request Count"] for record in records) == 3
    arrivals = sorted(receipt.arrival_s for receipt in served.receipts.values())
    finals = sorted(receipt.final_s for receipt in served.receipts.values())
    assert arrivals[3:] == finals[:-3]


def test_static_batches_are_emulated(setting):
    ((_, records),) = measured(TEN, "--static_emulated_batch_size", "4", "--static_emulated_timeout", "20")
    assert [record["New Requests"] for record in records if record["New Requests"]] == [4, 4, 2]


def test_a_gate_opens_for_whole_batches_and_after_its_delay():
    gate = Gate(batch_size=4, timeout_s=1.0)
    assert gate.allows(0.5, 4, 0.0, 0) == 4 and gate.allows(0.5, 3, 0.0, 0) == 0 and gate.allows(1.0, 3, 0.0, 0) == 4
    assert gate.allows(9.0, 8, 0.0, 1) == 0
    assert Gate(delay_s=0.5).allows(0.4, 8, 0.0, 0) == 0 and Gate(delay_s=0.5).allows(0.5, 8, 0.0, 3) == 8


def test_the_first_batch_can_be_delayed(setting):
    run, _ = setting
    assert run("--first_batch_delay", "80", "--out", "r.json") == 0
    assert read_result(Path("r.json"))["latency_ms"]["ttft"]["min"] >= 80


def test_the_saturation_is_found(setting, capsys):
    run, _ = setting
    assert run("--find-saturation", "--max-probes", "4", "--out", "s.json", "--max-batch-size", "1",
               step_seconds=0.002) == 0
    result = read_result(Path("s.json"))
    assert result["kind"] == "saturation" and len(result["points"]) == 4
    assert all(isinstance(point["sustained"], bool) for point in result["points"][1:])
    assert result["saturation"]["probes"] == 4 and "; 4 runs)" in capsys.readouterr().out


@pytest.mark.parametrize("limit, first", [(10.0, 25.0), (10.0, 4.0), (0.9, 8.0), (7.3, 7.3)])
def test_bisection_finds_a_limit_from_either_side(limit, first):
    tried = []
    found = find_saturation(lambda: {"requests_s": first}, lambda rate: tried.append(rate) or rate <= limit, 13, "")
    assert found.sustained <= limit < found.broken and found.broken / found.sustained < 1.05
    assert len(tried) == found.probes - 1 <= 12 and len(set(tried)) == len(tried)


def test_bisection_keeps_to_its_probes_and_says_what_it_does_not_know():
    assert find_saturation(lambda: {"requests_s": 1.0}, lambda rate: True, 4, "").broken is None
    never = find_saturation(lambda: {"requests_s": 8.0}, lambda rate: False, 4, "words")
    assert (never.sustained, never.broken, never.probes) == (None, 2.0, 4) and "no rate" in never.words()


def test_a_search_in_which_every_request_of_the_first_run_fails_says_why():
    with pytest.raises(BenchmarkError, match="every request failed .*, the first with: too long"):
        find_saturation(lambda: {"requests_s": 0.0, "failures": [{"error": "too long"}]}, None, 4, "")


def test_what_counts_as_sustained():
    point = {"failed": 0, "arrival_window_rate": 9.6, "offered_rate": 10.0, "goodput": {"share": 0.85}}
    bound = Bounds(ttft_ms=1.0)
    assert is_sustained(point, Bounds(), 0.9) and not is_sustained(point, bound, 0.9)
    assert is_sustained(point, bound, 0.85)
    for other in ({"failed": 1}, {"arrival_window_rate": 9.4}, {"arrival_window_rate": None}, {"offered_rate": None}):
        assert not is_sustained(point | other, Bounds(), 0.9) and not is_sustained(point | other, bound, 0.85)


def test_a_rate_within_the_bounds_is_sustained_only_if_it_is_completed(setting):
    """All requests are within a bound of a minute at any rate; the engine completes a request in its steps alone."""
    run, _ = setting
    requests = make_workload(count=16, vocab_size=1000, prompts=Lengths(4, 0, 4, 4, fixed=4),
                             outputs=Lengths(5, 0, 5, 5, fixed=5))
    Path("w.json").write_text(json.dumps(requests))
    assert run("--find-saturation", "--delays", "constant", "--slo-ttft-ms", "60000", "--max-probes", "4", "--out",
               "s.json", "--max-batch-size", "2", workload="w.json", step_seconds=0.004) == 0
    result = read_result(Path("s.json"))
    most = 2 / (5 * 0.004)                          # requests/s: two at a time, five steps each
    assert (result["saturation"]["sustained"] or 0.0) <= most / SUSTAINED_SHARE
    assert all(point["goodput"]["share"] == 1 for point in result["points"])
    assert not any(point["sustained"] for point in result["points"][1:] if point["request_rate"] > most * 1.1)


@pytest.mark.parametrize("count, seeds, tokens_of", [
    (32, 20, lambda random: np.ones(32)), (32, 20, lambda random: random.uniform(1, 190, 32)),
    (600, 2, lambda random: random.lognormal(3, 1.5, 600)), (600, 1, lambda random: np.repeat([10, 30], 300)),
    (600, 1, lambda random: np.repeat([30, 10], 300))])
def test_the_capacity_is_sustained_and_no_higher_rate(count, seeds, tokens_of, monkeypatch):
    """A server with a scripted clock completes 100 requests/s on average, one at a time.

    With Poisson arrivals, up to 240 seemed sustained; with one repetition of 600 requests, 109, or 69 with a longer
    second half. The 2 %: a queue holds other requests of the workload in each quarter.
    """
    capacity, requests = 100.0, make_workload(count=count, vocab_size=1000)
    options = parse_options(["--model", "none", "--workload", "w.json", "--find-saturation", "--max-batch-size", "2",
                             "--max-probes", "16"])
    for seed in range(seeds):
        options.random_seed = seed
        tokens = tokens_of(np.random.default_rng(seed)).astype(int) + 1
        for request, length in zip(requests["requests"], tokens.tolist(), strict=True):
            request["max_tokens"] = length
        seconds = tokens / tokens.mean() / capacity
        search = Measurement(options, requests)
        tried = []

        def serve(load, label, search=search, seconds=seconds, tried=tried):
            arrivals, finals, now = load.arriving(requests["requests"]), [], 0.0
            for request in arrivals:
                now = max(now, request["arrival_s"]) + seconds[request["id"] % count]
                finals.append(now)
            search.points.append({
                "failed": 0, "offered_rate": load.offered_rate(arrivals), "requests_s": len(finals) / now,
                "arrival_window_rate": arrival_window_rate(
                    np.array([request["arrival_s"] for request in arrivals]), np.array(finals))})
            tried.append(load.request_rate)
            return search.points[-1]
        monkeypatch.setattr(search, "_serve", serve)
        found = search._find_saturation()
        assert 0.9 * capacity < found.sustained <= 1.02 * capacity / SUSTAINED_SHARE
        assert not any(point["sustained"] for point, rate in zip(search.points[1:], tried[1:], strict=True)
                       if rate > 1.02 * capacity / SUSTAINED_SHARE)


def test_repetitions_have_their_own_ids_and_cache_salts():
    load = Load(request_rate=10.0, delays="constant", repetitions=3)
    requests = load.arriving(TEN["requests"])
    assert len({request["id"] for request in requests}) == len(requests) == 30
    assert [round(request["arrival_s"], 6) for request in requests] == [number / 10 for number in range(30)]
    made = [RequestOptions(cache_salt="run 1").make(request, streaming=True) for request in requests]
    assert [one.cache_salt for one in made[::10]] == ["run 1", "run 1, repetition 1", "run 1, repetition 2"]


@pytest.mark.parametrize("tokens, most_active, engines, expected", [
    ([5] * 10, 32, 1, 52), ([5] * 512, 32, 1, 4), ([5] * 513, 32, 1, 1), ([5] * 10, 10**6, 1, 205),
    ([5] * 700, 128, 1, 3), ([5] * 10, 1, 3, 5), ([5] * 2000, 1, 4, 4),
    ([5] * 800 + [8] * 800, 1, 1, 4),       # the second half has more work
    ([5] * 399 + [800] + [5] * 400, 1, 1, 4), (([5] * 400 + [8] * 400) * 2, 1, 1, 2)])
def test_a_workload_is_repeated_until_the_quarters_of_a_run_have_the_same_work(tokens, most_active, engines, expected):
    tokens, same = np.array(tokens), np.ones(len(tokens))
    for lengths in ((tokens, same), (same, tokens)):
        assert repetitions(np.arange(len(tokens)), *lengths, most_active, engines) == expected


def test_the_saturation_takes_some_requests():
    options = parse_options(["--model", "none", "--workload", "w.json", "--find-saturation"])
    with pytest.raises(InputError, match="4 requests"):
        Measurement(options, LONG)


def test_a_request_that_fails_is_named_and_the_rest_is_measured(setting, capsys):
    run, _ = setting
    requests = [*TEN["requests"][:3], dict(TEN["requests"][3], prompt=[5] * 2000)]
    Path("bad.json").write_text(json.dumps(dict(TEN, requests=requests)))
    assert run("--out", "r.json", workload="bad.json") == 1
    told = capsys.readouterr()
    assert "1 of 4 requests failed" in told.err and f"request {requests[3]['id']}: " in told.err and "2,000" in told.err
    assert read_result(Path("r.json"))["failed"] == 1 and "1 failed" in told.out


def test_datasets_of_the_original_are_served(setting):
    run, _ = setting
    samples = [{"input_ids": one["prompt"], "output_len": one["max_tokens"]} for one in TEN["requests"]]
    Path("d.json").write_text(json.dumps(samples))
    assert run("--out", "r.json", workload="d.json") == 0
    result = read_result(Path("r.json"))
    assert (result["n"], result["prompt_tokens"], result["failed"]) == (10, TEN["prompt_tokens"], 0)


def test_traces_are_replayed_and_what_was_cut_is_said(setting, capsys):
    run, _ = setting
    Path("t.csv").write_text("arrival_s,input_tokens,output_tokens\n7.0,12,3\n8.0,40,2\n")
    assert program.main(["--model", "none", "--workload", "t.csv", "--tokens-per-block", "8", "--max-batch-size", "2",
                         "--time-scale", "0.05", "--max-input-tokens", "20", "--out", "r.json"]) == 0
    result = read_result(Path("r.json"))
    assert (result["mode"], result["prompt_tokens"], result["output_tokens"]) == ("online", 32, 5)
    assert 0.05 <= result["wall_s"] < 1
    assert "t.csv: 1 request with a prompt truncated" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"requests": []}'])
def test_a_workload_that_is_none_is_status_two(setting, capsys, text):
    run, folder = setting
    if text is not None:
        Path("w.json").write_text(text)
    assert run("--out", "r.json", workload="w.json") == 2
    error = capsys.readouterr().err
    assert "w.json" in error and not (folder / "r.json").exists()
    assert text != "no JSON" or error.endswith("; set the format with --format\n")


@pytest.mark.parametrize("given, told", [
    (["--tokenizer", "t"], "--tokenizer is t; it has no effect on a workload with token ids; leave out --tokenizer"),
    (["--output-tokens", "7"], "--output-tokens is 7; it has no effect on a workload with token ids"),
    (["--eos-id", "1000"], "--eos-id is 1000; the vocabulary has 1,000 tokens; expected -1 for none, or 0 to 999"),
    (["--pad-id", "1000"], "--pad-id is 1000; the vocabulary has 1,000 tokens"),
])
def test_options_that_do_not_fit_the_workload_or_the_model_are_refused_once(given, told, setting, capsys):
    run, _ = setting
    assert run(*given) == 2 and capsys.readouterr().err.count(told) == 1


def test_a_reader_that_goes_costs_no_file(tmp_path):
    workload = dict(TEN, requests=TEN["requests"][:2], n=2)
    (tmp_path / "w.json").write_text(json.dumps(workload))
    process = forked.Popen([sys.executable, "-c", SCRIPTED, "--model", "none", "--workload", "w.json", "--out",
                            "r.json", "--warm-up", "0", "--tokens-per-block", "8", "--quiet"], cwd=tmp_path,
                           text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    assert process.wait(timeout=120) == 0 and process.stderr.read() == ""
    process.stderr.close()
    assert read_result(tmp_path / "r.json")["n"] == 2


def test_results_of_other_versions_are_refused_by_name(tmp_path):
    path = tmp_path / "r.json"
    good = {"format": "batch-manager bench", "format_version": FORMAT_VERSION, "kind": "run"}
    for wrong, told in ((None, "cannot be read"), ([], "not a JSON object"), ({"peer": "vllm"}, "its format is None"),
                        (good | {"format_version": 99}, "format_version 99"), (good | {"kind": "x"}, "kind 'x'"),
                        (good | {"kind": "sweep"}, "points")):
        if wrong is not None:
            path.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=told):
            read_result(path)
    path.write_text(json.dumps(good))
    assert read_result(path) == good


def test_ctrl_c_ends_the_engine_and_says_what_was_measured(tmp_path):
    Path(tmp_path / "long.json").write_text(json.dumps(LONG))
    process = forked.Popen(
        [sys.executable, "-c", SCRIPTED, "--model", "none", "--workload", "long.json", "--out", "r.json",
         "--warm-up", "0", "--tokens-per-block", "8", "--log-iteration-data"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.stderr.readline()                        # the first iteration
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "0 of 4 requests were done" in error and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.json"]


def test_times_of_a_trace_count_from_the_arrival_of_the_client(setting):
    run, folder = setting
    assert run("--max-batch-size", "1", "--max-num-sequences", "1", "--trace", "t.trace", "--out", "r.json",
               step_seconds=0.002) == 0
    with Path("t.trace").open("rb") as file:
        found = list(lives(read_trace(file)))
    longest = max(life.seconds for life in found)
    assert {life.settings["max_num_sequences"] for life in found} == {1}      # the first iteration was a warm-up
    assert len(found) == 10 and longest * 1e3 == pytest.approx(
        read_result(Path("r.json"))["latency_ms"]["e2e"]["max"], rel=0.25)
    assert sum(life.spans[0].kind == CLIENT for life in found) >= 8


def test_a_rate_and_a_concurrency_together(setting):
    """Requests arrive at their rate; those above the limit wait in the client, and the wait is latency."""
    run, _ = setting
    ((served, records),) = measured(TEN, "--request-rate", "1000000", "--delays", "constant", "--concurrency", "2")
    assert max(record["Active Request Count"] for record in records) == 2
    arrivals = [receipt.arrival_s for receipt in served.receipts.values()]
    assert sorted(arrivals) == pytest.approx([number / 1_000_000 for number in range(10)])
    assert run("--request-rate", "50", "--concurrency", "2", "--out", "r.json") == 0
    result = read_result(Path("r.json"))
    assert (result["request_rate"], result["delays"], result["concurrency"]) == (50, "exponential", 2)
    assert load_words(result) == "50 requests/s (Poisson), at most 2 in progress" and result["offered_rate"]


def test_the_latencies_of_every_request_are_written(setting):
    run, _ = setting
    assert run("--sweep", "concurrency=1,2", "--requests-csv", "requests.csv", "--out", "r.json") == 0
    with open("requests.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20 and [row["run"] for row in rows[::10]] == ["1", "2"]
    for point, of in zip(read_result(Path("r.json"))["points"], (rows[:10], rows[10:]), strict=True):
        assert {row["concurrency"] for row in of} == {str(point["concurrency"])}
        for name, key in (("ttft", "ttft_ms"), ("e2e", "e2e_ms"), ("tpot", "tpot_ms")):
            values = [float(row[key]) for row in of if row[key]]
            assert sum(values) / len(values) == pytest.approx(point["latency_ms"][name]["avg"], abs=0.002)
        assert sum(int(row["output_tokens"]) for row in of) == TEN["output_tokens"]
        assert sum(int(row["prompt_tokens"]) for row in of) == TEN["prompt_tokens"]
