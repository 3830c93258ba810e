"""Simulated loads as those of bench: sessions turn by turn, and a rate with a limit of requests in progress."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batch_manager.tools.bench.client import NOT_SENT
from batch_manager.tools.bench.result import read_result
from batch_manager.tools.simulate.__main__ import main
from batch_manager.tools.simulate.backend import TOKEN
from batch_manager.tools.simulate.figures import stamps_of
from batch_manager.tools.simulate.fleet import simulate
from tests.tools.simulated import lengths, random_run, records, turns_of
from tests.tools.test_bench_sessions import workload_of
from tests.tools.test_simulate import ENGINE, PLAIN

# Session 4: three turns, the last after 2 s of thought. Session 9: two turns. One request of its own.
TURNS = [(4, 0.0, 100, 20, 0.0), (None, 0.0, 30, 5, 0.0), (9, 0.5, 60, 10, 0.0), (4, 0.0, 7, 9, 0.0),
         (9, 0.5, 50, 1, 0.0), (4, 0.0, 1, 3, 2.0)]


@pytest.mark.parametrize("leaps", [True, False])
def test_a_turn_follows_the_answer_with_the_whole_history(leaps):
    traffic = turns_of(TURNS)
    stamps = stamps_of(simulate(traffic, ENGINE, PLAIN, leaps=leaps, num_replicas=2))
    assert stamps.arrival_s.tolist() == [0, 0, 0.5, stamps.last_s[0], stamps.last_s[2], stamps.last_s[3] + 2]
    assert stamps.prompt_tokens.tolist() == [100, 30, 60, 127, 120, 137]
    assert stamps.tokens.tolist() == [20, 5, 10, 9, 1, 3]
    third, last = traffic.prompt(3).tolist(), traffic.prompt(5).tolist()
    assert third == [10] * 100 + [TOKEN] * 20 + [13] * 7 and last == [*third, *[TOKEN] * 9, 15]


def test_the_answer_is_found_in_the_cache():
    """All of it but the last token, whose keys and values no step computed."""
    traffic = turns_of([TURNS[0], TURNS[3]])
    assert [simulate(traffic, replace(ENGINE, enable_block_reuse=reuse), PLAIN).replicas[0].reused_tokens
            for reuse in (False, True)] == [0, 100 + 20 - 1]


def test_after_a_failed_turn_the_later_ones_are_not_sent():
    run = simulate(turns_of([(1, 0.0, 40, 5, 0.0), (1, 0.0, 600, 5, 0.0), (1, 0.0, 1, 1, 0.0), (1, 0.0, 1, 1, 9.0)]),
                   ENGINE, PLAIN, concurrency=1)
    assert list(run.log_book.errors) == [1, 2, 3] and "645" in run.log_book.errors[1]
    assert [run.log_book.errors[index] for index in (2, 3)] == [NOT_SENT] * 2
    assert run.arrival_s[1:] == [run.wall_s] * 3


@pytest.mark.parametrize("seed", range(200, 210))
def test_leaps_change_no_record_of_sessions_and_limits(seed):
    with_leaps, one_by_one = (random_run(seed, 40, leaps, sessions=8, is_asynchronous=bool(seed % 2))
                              for leaps in (True, False))
    assert records(with_leaps) == records(one_by_one)


def test_a_limit_holds_requests_back_in_the_order_of_arrival():
    """With one in progress, each request is served alone, however many the engine could serve."""
    traffic = lengths(np.arange(40) * 0.02, [100] * 40, [10] * 40)
    stamps = stamps_of(simulate(traffic, ENGINE, PLAIN, at_most=1))
    assert stamps.arrival_s.tolist() == traffic.arrival_s.tolist()
    prompt_s, answer_s = 0.002 + 0.020 + 100 * 0.0001, 9 * (0.002 + 0.010 + 0.001)
    assert stamps.first_s == pytest.approx(np.arange(40) * (prompt_s + answer_s) + prompt_s)
    stamps = stamps_of(simulate(traffic, ENGINE, PLAIN, at_most=3, num_replicas=2, routing="least-loaded"))
    begins = stamps.first_s - prompt_s - 0.02
    assert max(np.count_nonzero((stamps.first_s <= at) & (stamps.last_s > at)) for at in begins) <= 3


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replace(PLAIN, about={"num_blocks": 100, "tokens_per_block": 16}).write(tmp_path / "cost.json")
    Path("w.json").write_text(json.dumps(workload_of()))
    return lambda *more: main(["--cost", "cost.json", "--workload", "w.json", "--out", "r.json", "--requests-csv",
                               "each.csv", *more])


@pytest.mark.parametrize("load, mode", [
    ((), "offline"), (("--concurrency", "1"), "closed loop"), (("--concurrency", "2"), "closed loop"),
    (("--request-rate", "2", "--delays", "constant"), "online"),
    (("--request-rate", "2", "--delays", "constant", "--concurrency", "1", "--replicas", "2"), "online")])
def test_the_figures_of_turns_are_those_of_bench(call, load, mode, capsys):
    """The tokens of test_bench_sessions.py, whose workload this is."""
    assert call(*load) == 0
    result = read_result(Path("r.json"))
    assert (result["n"], result["sessions"], result["failed"], result["mode"]) == (7, 3, 0, mode)
    assert [(turn["turn"], turn["n"], turn["prompt_tokens"]) for turn in result["turns"]] == [
        (1, 3, 17), (2, 2, 13 + 15), (3, 1, 19)]
    assert "7 requests of 3 sessions" in capsys.readouterr().out
    with open("each.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["session"], row["turn"]) for row in rows if row["id"] in ("0", "1", "4", "6")] == [
        ("", ""), ("7", "1"), ("7", "2"), ("7", "3")]
    if mode == "online":
        assert [float(row["arrival_ms"]) for row in rows if row["turn"] in ("", "1")] == [0, 500, 1000, 1500]
        assert result["offered_rate"] == 2
    for one in rows:      # the session's next turn arrives when it is answered, session 7's second 20 ms later
        for after in rows:
            if one["session"] and one["session"] == after["session"] and int(after["turn"]) == int(one["turn"]) + 1:
                think_ms = 20 if (after["session"], after["turn"]) == ("7", "2") else 0
                assert float(after["arrival_ms"]) == pytest.approx(
                    float(one["arrival_ms"]) + float(one["e2e_ms"]) + think_ms, abs=2e-3)


def test_searches_refuse_sessions(call, capsys):
    for search in ("--find-saturation", "--find-replicas"):
        assert call(search) == 2 and "--turns 1" in capsys.readouterr().err
