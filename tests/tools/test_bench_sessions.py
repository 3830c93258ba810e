"""Sessions: each turn is sent after the answer to the one before it, with the history before its own tokens."""

import csv
import json
from pathlib import Path

import pytest

from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.__main__ import main
from batch_manager.tools.bench import __main__ as program
from batch_manager.tools.bench import measurement as measuring
from batch_manager.tools.bench import run as serving
from batch_manager.tools.bench.client import NOT_SENT
from batch_manager.tools.bench.files import request_rows
from batch_manager.tools.bench.metrics import turn_figures
from batch_manager.tools.bench.result import read_result

# session -> [(tokens of the new turn, output length, think_s)]; None: a request of its own. Session 7 thinks.
SESSIONS = {None: [(5, 3, 0.0)], 7: [(6, 4, 0.0), (3, 5, 0.02), (1, 1, 0.0)], 2: [(9, 2, 0.0), (4, 6, 0.0)],
            5: [(2, 2, 0.0)]}


def workload_of(sessions=SESSIONS, arrival_s=lambda number: 0.0):
    """Return a workload in which the turns of the sessions lie between each other."""
    requests = []
    for turn in range(max(map(len, sessions.values()))):
        for number, (session, turns) in enumerate(sessions.items()):
            if turn < len(turns):
                length, output, think_s = turns[turn]
                made = {"id": len(requests), "arrival_s": arrival_s(number), "max_tokens": output,
                        "prompt": [100 * number + 10 * turn + at for at in range(length)]}
                requests.append(made | ({} if session is None else {"session": session})
                                | ({"think_s": think_s} if think_s else {}))
    return {"vocab": 1000, "mode": "offline", "n": len(requests), "requests": requests}


def by_session(requests):
    found = {}
    for request in requests:
        if "session" in request:
            found.setdefault(request["session"], []).append(request)
    return found


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Return a function that runs the program with a scripted backend. It returns (status, result, Served)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving, "vocabulary_of", lambda options: 1000)
    session, all_served = measuring.Session, []

    class Scripted(session):
        def __init__(self, options, workload, parts, **more):
            backend = ScriptedBackend(num_blocks=64, tokens_per_block=8, max_seq_len=64)
            super().__init__(options, workload, Parts(backend=backend), **more)

        def serve(self, load):
            all_served.append(super().serve(load))
            return all_served[-1]
    monkeypatch.setattr(measuring, "Session", Scripted)

    def run(*arguments, workload=None):
        Path("w.json").write_text(json.dumps(workload or workload_of()))
        status = program.main(["--model", "none", "--workload", "w.json", "--max-batch-size", "4", "--tokens-per-block",
                               "8", "--out", "r.json", "--requests-csv", "requests.csv", "--warm-up", "0", "--quiet",
                               *arguments])
        return status, read_result(Path("r.json")) if status != 2 else None, all_served[-1] if all_served else None
    return run


@pytest.mark.parametrize("load", [(), ("--concurrency", "1"), ("--concurrency", "2"), ("--request-rate", "200"),
                                  ("--request-rate", "200", "--concurrency", "2"), ("--no-streaming",),
                                  ("--no-streaming", "--no-exclude-input-in-output-seq"), ("--block-reuse",)])
def test_a_turn_follows_the_answer_with_the_whole_history(load, bench, capsys):
    status, result, served = bench(*load)
    receipts = served.receipts
    assert status == 0 and (result["n"], result["sessions"], result["failed"]) == (7, 3, 0)
    new = {request["id"]: request["prompt"] for request in workload_of()["requests"]}
    ends = []
    for turns in by_session(served.requests).values():
        history, before = [], None
        for request in turns:
            receipt = receipts[request["id"]]
            assert request["prompt"] == history + new[request["id"]]
            assert receipt.tokens == ScriptedBackend.expected_tokens(request["prompt"], request["max_tokens"])
            history = request["prompt"] + receipt.tokens
            assert before is None or receipt.arrival_s == before + request.get("think_s", 0.0)
            before = receipt.final_s
        ends.append((receipts[turns[0]["id"]].arrival_s, before))
    ends += [(receipts[0].arrival_s, receipts[0].final_s)]
    if load[0:1] == ("--concurrency",):
        at_once = max(sum(start <= at < end for start, end in ends) for at, _ in ends)
        assert at_once == int(load[1])
    with open("requests.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["session"], row["turn"]) for row in rows if row["id"] in ("0", "1", "4", "6")] == [
        ("", ""), ("7", "1"), ("7", "2"), ("7", "3")]
    assert [int(row["prompt_tokens"]) for row in rows if row["session"] == "7"] == [6, 13, 19]
    assert [(turn["turn"], turn["n"], turn["prompt_tokens"]) for turn in result["turns"]] == [
        (1, 3, 17), (2, 2, 13 + 15), (3, 1, 19)]
    assert "7 requests of 3 sessions" in capsys.readouterr().out


def test_a_rate_is_one_of_sessions(bench):
    _, result, served = bench("--request-rate", "100", "--delays", "constant")
    firsts = [request for request in served.requests if request.get("turn", 1) == 1]
    assert sorted(request["arrival_s"] for request in firsts) == [0.0, 0.01, 0.02, 0.03]
    assert result["offered_rate"] == 100


def test_after_a_failed_turn_the_later_ones_are_not_sent(bench, capsys):
    status, result, served = bench(workload=workload_of({1: [(60, 2, 0.0), (10, 2, 0.0), (1, 1, 0.0), (1, 1, 0.0)],
                                                         2: [(4, 2, 0.0), (4, 2, 0.0)]}))
    errors = [served.receipts[turn["id"]].error for turn in by_session(served.requests)[1]]
    assert status == 1 and result["failed"] == 3
    assert not errors[0] and errors[1] not in ("", NOT_SENT) and errors[2:] == [NOT_SENT, NOT_SENT]
    assert [turn["failed"] for turn in result["turns"]] == [0, 1, 1, 1]


def test_requests_without_sessions_have_no_turns(bench):
    _, result, served = bench("--turns", "1")
    assert (result["n"], result["sessions"], result["turns"]) == (4, None, None)
    assert next(iter(request_rows([served], streaming=True)))[-1] == "error"
    assert turn_figures(served.requests, served.receipts, 1.0, streaming=True) is None


def test_programs_that_do_not_serve_sessions_refuse_them(bench, capsys):
    assert bench("--find-saturation")[0] == 2 and "--turns 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--model", "none", "--workload", "w.json", "--find-saturation", "--delays", "exponential"])
    capsys.readouterr()
    assert main(["workload", "dataset", "w.json", "--as", "dataset", "--out", "d.json"]) == 2
    assert "--turns 1" in capsys.readouterr().err
    assert main(["workload", "dataset", "w.json", "--as", "dataset", "--turns", "1", "--out", "d.json"]) == 0
    assert len(json.loads(Path("d.json").read_text())["samples"]) == 4
