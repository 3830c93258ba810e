import json

import pytest

from batch_manager.tools import host_bench, stub_model
from batch_manager.tools.host_bench import COLUMNS, Setting, Stopwatch, measure

SETTING = dict(batch=5, iterations=12, policy="guaranteed_no_evict")


def test_a_full_batch_generates_in_every_iteration():
    result = measure(Setting(streaming=True, **SETTING))
    assert result["responses_per_iteration"] == 5
    assert result["phases_us"].keys() == set(COLUMNS) and all(time > 0 for time in result["phases_us"].values())
    assert result["host_us"]["min"] <= result["host_us"]["median"] <= result["host_us"]["p99"]


def test_without_streaming_nothing_is_sent_while_nobody_ends():
    assert measure(Setting(streaming=False, **SETTING))["responses_per_iteration"] == 0


@pytest.mark.parametrize("arguments, told", [
    (["--batch", "1", "100000000"], "--batch: 100000000 is too large; expected at most 100000"),
    (["--waiting", "100001"], "--waiting: 100001 is too large; expected at most 100000"),
    (["--queued", "99999999"], "--queued: 99999999 is too large; expected at most 100000"),
    (["--iterations", "1000001"], "--iterations: 1000001 is too large; expected at most 1000000"),
    (["--output-tokens", "1000001"], "--output-tokens: 1000001 is too large; expected at most 1000000"),
    (["--batch", "1", "100000", "--output-tokens", "1"],
     "300 iterations of 100,000 requests that end after 1 tokens need "
     "33,000,000 requests; expected at most 1,000,000; lower --batch or --iterations, or raise --output-tokens"),
    (["--batch", "100000", "--iterations", "1000000"],
     "100,000 active requests of up to 1,000,108 tokens need 1,562,800,000 blocks of the KV cache; expected at most")])
def test_settings_that_no_machine_has_room_for_are_refused(arguments, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        host_bench.main(arguments)
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.parametrize("policy", host_bench.POLICIES)
def test_requests_that_end_are_replaced(policy):
    setting = Setting(batch=6, iterations=30, streaming=False, policy=policy, output_len=4, tokens_per_block=8)
    assert 1.0 < measure(setting)["responses_per_iteration"] < 2.0


def test_the_native_backend_counts_as_host_time():
    result = measure(Setting(streaming=True, native=True, **SETTING))
    assert result["responses_per_iteration"] == 5 and result["native"]
    assert result["host_us"]["median"] > result["phases_us"]["model"] > 0 and result["ratio"] > 0


@pytest.mark.parametrize("tokens_per_block", [8, 64])
def test_each_generation_step_replays_a_graph_whose_parts_are_timed(tokens_per_block, monkeypatch):
    replay, replayed = stub_model.StubGraphs.replay, []
    monkeypatch.setattr(stub_model.StubGraphs, "replay", lambda graphs, shape: replayed.append(shape) or replay(
        graphs, shape))
    setting = Setting(streaming=True, native=True, replays=True, tokens_per_block=tokens_per_block, **SETTING)
    loop, clients = host_bench.make_loop(setting, Stopwatch())
    for _ in range(4):
        loop.step(accept_new=True)
    assert len(replayed) == 3                                          # the first step computes the prompts
    assert clients.num_responses == 4 * 5
    result = measure(setting)
    assert result["responses_per_iteration"] == 5 and result["replay_us"].keys() == set(host_bench.REPLAY_COLUMNS)
    assert all(time > 0 for time in result["replay_us"].values())
    assert sum(result["replay_us"].values()) < 2 * result["phases_us"]["model"]


def test_requests_that_end_are_replaced_in_steps_that_replay_graphs():
    setting = Setting(batch=6, iterations=30, streaming=False, policy="max_utilization", output_len=4, native=True,
                      replays=True)
    assert 1.0 < measure(setting)["responses_per_iteration"] < 2.0


def test_the_program_measures_a_native_backend_with_and_without_graphs(capsys):
    assert host_bench.main(["--native", "--batch", "2", "--iterations", "5", "--no-streaming"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["2"] * 3 and "with replayed graphs, the model is write " in rows[3]
    results = json.loads(last)["results"]
    assert [result["replays"] for result in results] == [False, True] and results[0]["replay_us"] is None


@pytest.mark.parametrize("options", [["--step-ms", "2"], ["--run-ahead"]])
def test_a_native_backend_with_an_asynchronous_device_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        host_bench.main(["--native", *options])
    assert "leave out one of them" in capsys.readouterr().err


def test_a_part_is_not_charged_for_the_model_inside_it(monkeypatch):
    ticks = iter([0, 10, 25, 100])      # part begins, model begins, model ends, part ends
    monkeypatch.setattr(host_bench, "perf_counter_ns", lambda: next(ticks))
    stopwatch = Stopwatch()
    stopwatch.watch("claim", stopwatch.watch("model", lambda: None))()
    spent = stopwatch.take()
    assert (spent["model"], spent["claim"]) == (15, 85)
    assert not any(stopwatch.take().values())


def test_the_program_prints_a_table_and_a_line_of_json(capsys):
    assert host_bench.main(["--batch", "1", "3", "--iterations", "5", "--spinning-client",
                                "--switch-interval", "0.0005"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["1", "no"], ["3", "no"], ["1", "yes"], ["3", "yes"]]
    report = json.loads(last)
    assert [(row["batch"], row["streaming"]) for row in report["results"]] == [
        (1, False), (3, False), (1, True), (3, True)]


@pytest.mark.parametrize("waiting, queued", [(7, 0), (0, 9), (7, 9)])
def test_requests_that_wait_go_on_waiting(waiting, queued):
    setting = Setting(streaming=True, waiting=waiting, queued=queued, **SETTING)
    loop, _ = host_bench.make_loop(setting, Stopwatch())
    for _ in range(3):
        loop.step(accept_new=True)
    assert [request.is_generating for request in loop.active] == [True] * 5 + [False] * waiting
    assert len(loop.intake) == queued
    result = measure(setting)
    assert (result["waiting"], result["queued"], result["responses_per_iteration"]) == (waiting, queued, 5)


@pytest.mark.parametrize("option", ["--step-ms", "--switch-interval"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x", "1e300"])
def test_a_time_that_cannot_be_is_refused(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        host_bench.main(["--batch", "1", "--iterations", "1", f"{option}={value}"])
    assert f"argument {option}: " in capsys.readouterr().err


def test_a_switch_interval_of_zero_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        host_bench.main(["--switch-interval", "0"])
    assert "out of range; expected 1e-06 to 60" in capsys.readouterr().err
