"""Without a GPU, all code of the GPU report runs, each line of its output is a valid record, and so is each failure."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import make_dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.gpu_report.goals import ALL, GOALS
from tests.benchmarks.gpu_report.records import DRY, FAILED, NOT_REACHED, Record, check, read
from tests.benchmarks.gpu_report.sections import EAGER, SECTIONS, WITH_BUDGET, Section, chosen, functions
from tests.harness.waiting import has_ended, until

RUN = [section.name for section in SECTIONS if section.name != "transformers" and not section.name.endswith(EAGER)]

PEER_ATTENTION = """
import torch

from batch_manager.triton_kernels.reference.paged_attention_context import paged_attention_context

NAME = "a peer"


def decode(query, kv_pool, block_table, kv_lengths, scale):
    starts = torch.arange(len(query) + 1)
    return paged_attention_context(query, kv_pool, block_table, starts, kv_lengths, None, scale)


def context(query, kv_pool, block_table, cu_seqlens, kv_lengths, scale):
    return paged_attention_context(query, kv_pool, block_table, cu_seqlens, kv_lengths, None, scale)
"""

# A report whose section never ends, and prints the number of its process.
ENDLESS = """
import os, sys, time
from tests.benchmarks.gpu_report import __main__ as program, processes
def endless():
    print(os.getpid(), flush=True)
    time.sleep(600)
program.report = lambda *given: processes.in_a_process(endless, None)
sys.exit(program.main(["--dry-run", "--out", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Return (records, output folder, stderr) of a dry run in its own process. The run measures a peer's attention too.

    The run leaves out transformers, which takes seconds to import and has its own test, and sections without graphs.
    """
    folder = tmp_path_factory.mktemp("report")
    peers = folder / "peers"
    peers.mkdir()
    (peers / "attention.py").write_text(PEER_ATTENTION)
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "tests.benchmarks.gpu_report", "--out",
         str(folder / "out"), "--dry-run", "--peers", str(peers), "--section", *RUN],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        cwd=Path(__file__).parents[3], timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read(folder / "out" / "gpu_report.jsonl"), folder / "out", done.stderr


def test_a_dry_run_comes_to_every_goal_and_has_no_numbers(dry_run):
    lines, *_ = dry_run
    assert {line["goal"] for line in lines} == set(ALL) - {"G6b", "G6-peer"}
    for line in lines:
        assert line["status"] == DRY, line
        assert line["ratio"] is None and line["numerator"] is None and line["met"] is None
        assert line["device"].startswith("dry run") and line["versions"].keys() >= {"batch_manager", "torch", "triton"}


def test_engines_are_measured_with_graphs_and_the_report_has_two_files(dry_run):
    lines, folder, _ = dry_run
    labels = {(line["goal"], line["case"].partition(",")[0].partition(":")[0]) for line in lines}
    engines = {"G3", "G3b-135M", "G3b-1B", "G4", "G4-share", "G8", "G8-overlap", "G6", "G6-share", "G7", "G9", "fact",
               "profile"}
    assert {goal for goal, label in labels if label == "graphs"} == engines
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_report.jsonl", "gpu_report.md"]


def test_the_estimates_of_every_section_fit_its_budget_and_all_fit_eight_minutes(dry_run):
    *_, printed = dry_run
    used = {name: (float(seconds), float(budget)) for name, seconds, budget in re.findall(
        r"^-- (.*): ([\d.]+) s of (\d+) s$", printed, re.MULTILINE)}
    assert list(used) == RUN
    assert sum(section.seconds for section in WITH_BUDGET) <= 8 * 60
    for section in WITH_BUDGET:
        seconds, budget = used[section.name]
        assert budget == section.seconds
        # The last one uses all the time that is left.
        assert seconds <= budget or section is WITH_BUDGET[-1], section.name
    assert re.search(r"^large-steps +65 s +ends by", printed, re.MULTILINE)


def test_the_sections_are_those_that_have_code_and_report_every_goal():
    assert [section.name for section in SECTIONS] == sorted(functions(), key=[one.name for one in SECTIONS].index)
    assert {goal for section in SECTIONS for goal in section.goals} == set(ALL) - {"G6-peer"}
    assert SECTIONS[-1].name == "transformers"                    # no serious peer
    names = [section.name for section in chosen([], has_rates=False)]
    assert names == [section.name for section in SECTIONS] and len(set(names)) == len(names)
    for given, has_rates, expected in (
            (["sampling", "headline"], False, ["rates", "headline", "sampling"]), (["headline"], True, ["headline"]),
            (["correctness"], False, ["correctness"]), ([], True, names[1:])):
        assert [section.name for section in chosen(given, has_rates=has_rates)] == expected


def test_the_sections_of_the_first_quarter_of_an_hour_fit_its_steps():
    from tests.first_quarter.runner import REPORT_START_SECONDS
    from tests.first_quarter.steps import STEPS

    given = []
    for step in STEPS:
        if "--section" in step.command:
            given += (names := step.command[step.command.index("--section") + 1 :])
            seconds = sum(one.seconds for one in chosen(names, has_rates=step.name != "headline"))
            assert seconds <= step.limit - REPORT_START_SECONDS or step.name in ("correctness-fp16", "correctness-fp32")
    assert set(given) >= {"correctness", "headline", "profile", "sampling", "decode-split"}
    assert set(given) <= {one.name for one in SECTIONS}


def test_a_section_without_graphs_runs_unless_there_were_none(tmp_path, monkeypatch):
    from tests.benchmarks.gpu_report import decode_steps
    from tests.benchmarks.gpu_report.engines import graphless
    from tests.benchmarks.gpu_report.shapes import LLAMA_1B, LLAMA_135M

    monkeypatch.setattr(decode_steps, "run_small", lambda bench, graphs: iter([graphs]))
    bench, run = dry_bench(tmp_path), functions()["small-steps-eager"]
    assert list(run(bench)) == [False]
    for shape, expected in ((LLAMA_135M, [False]), (LLAMA_1B, [])):
        graphless(bench, shape).write_text("no graphs were captured")
        assert list(run(bench)) == expected


def test_every_kernel_is_compared_by_value(dry_run):
    lines, *_ = dry_run
    kernels = {line["case"].partition(" ")[0] for line in lines if line["goal"] == "correctness"}
    assert kernels == {
        "activation", "ban_ngrams", "ban_words", "beam_topk", "deterministic_linear", "fused_linear",
        "gated_activation", "layer_norm", "lora_expand_add", "lora_shrink", "match_stop_words", "moe_grouped_gemm",
        "paged_attention_context", "paged_attention_decode", "paged_attention_merge", "philox", "prepare_step",
        "quantised_linear", "rms_norm", "rope_kv_append", "sample_token",
        "token_bitmask", "token_penalties"}


def test_it_compares_with_the_peer(dry_run):
    lines, folder, _ = dry_run
    notes = {line["goal"]: line["note"] for line in lines}
    assert notes["G1c"] == notes["G2b"] == notes["G2b-64"] == "against a peer"
    assert (folder / "gpu_report.md").read_text().count("\n| G") >= len(GOALS) - 1


def test_the_fastest_settings_are_written_as_code(dry_run):
    lines, folder, _ = dry_run
    text = (folder / "gpu_report.md").read_text()
    for function in ("decode_settings", "context_settings", "settings_of_few_rows", "decode_work_list"):
        assert f"`{function}` in triton_kernels/" in text
    cases = [line["case"] for line in lines if line["goal"] in ("settings", "sampling", "decode-split")]
    assert len(cases) == len(set(cases)) >= 25 and "| rate | predicted |" in text


@pytest.mark.parametrize("names, chosen", [(("block_size",), "block_size"), (("page_size",), "page_size"),
                                           (("page_size", "block_size"), "page_size")])
def test_the_page_size_of_transformers_is_given_by_the_name_that_this_release_has(names, chosen, monkeypatch):
    from types import SimpleNamespace

    from tests.benchmarks.gpu_report.transformers_peer import _sizes

    config = make_dataclass("Config", [*names, "num_blocks", "max_batch_tokens"], init=False)
    config.__init__ = lambda self, **given: vars(self).update(given)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(ContinuousBatchingConfig=config))
    assert vars(_sizes(SimpleNamespace(is_dry=True))["continuous_batching_config"]) == {
        chosen: 16, "num_blocks": 16, "max_batch_tokens": 32}
    assert _sizes(SimpleNamespace(is_dry=False)) == {}


def test_transformers_serves_the_same_requests(tmp_path):
    pytest.importorskip("transformers")
    from tests.benchmarks.gpu_report.shapes import TINY
    from tests.benchmarks.gpu_report.transformers_peer import run, serve_with_transformers

    bench = dry_bench(tmp_path)
    requests = [{"id": 0, "prompt": [3, 4, 5], "max_tokens": 2}, {"id": 1, "prompt": [6], "max_tokens": 4}]
    rate, note = serve_with_transformers(bench, TINY, requests, 30.0)
    assert rate > 0 and "stopped" not in note
    (record,) = run(bench)
    assert record.status == NOT_REACHED and "headline" in record.note
    bench.lines = [Record("G6", "256 requests", 7.0).line(HEADER, dry=False)]
    (record,) = run(bench)
    assert (record.status, record.numerator) == ("measured", 7.0) and record.denominator > 0


# ---------------------------------------------------------------------- records


HEADER = {"device": "some GPU", "versions": {}, "commit": "abc", "date": "2026-12-01"}


@pytest.mark.parametrize("goal, numerator, denominator, met", [
    ("G1", 91.0, 100.0, True), ("G1", 89.0, 100.0, False), ("G4", 20.0, 20.0, True), ("G4", 21.0, 20.0, False),
    ("G7", np.float64(3.0), np.float64(1.0), False),
    ("G8-overlap", 1.0, 2.0, None), ("G1", 1.0, None, None)])
def test_a_goal_is_met_when_its_ratio_is_on_the_right_side_of_the_floor(goal, numerator, denominator, met):
    line = Record(goal, "a case", numerator, denominator).line(HEADER, dry=False)
    check(line)
    assert line["met"] is met
    assert Record(goal, "a case", numerator, denominator, judged=False).met is None


def test_a_line_that_is_no_line_is_refused():
    good = Record("G1", "a case", 1.0, 2.0, figures="0.5 s").line(HEADER, dry=False)
    check(good)
    assert good["note"] == "0.5 s"
    dry = Record("G1", "a case", 1.0, 2.0, figures="0.5 s").line(HEADER, dry=True)
    check(dry)
    assert (dry["note"], dry["ratio"], dry["status"]) == ("", None, DRY)
    for change in ({"goal": "G99"}, {"status": "done"}, {"ratio": "0.5"}, {"met": 1}, {"numerator": True},
                   {"status": FAILED}, {"numerator": None}, {"status": DRY}, {"extra": 1}):
        with pytest.raises(ValueError):
            check(good | change)
    with pytest.raises(ValueError, match="expected the fields"):
        check({name: value for name, value in good.items() if name != "commit"})


# ---------------------------------------------------------------------- sections and their time


def dry_bench(tmp_path, *, is_dry=True):
    """Return a Bench on the CPU, whose clock says that it is a GPU's unless `is_dry`."""
    import torch

    from tests.benchmarks.gpu_report.bench import Bench
    from tests.benchmarks.gpu_report.device_clock import DryClock

    clock = DryClock(torch.device("cpu"))
    clock.is_dry = is_dry
    return Bench(clock, torch.float32, tmp_path)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the function `run(*sections, minutes=8)`, which returns the lines of a report. See `section`."""
    from tests.benchmarks.gpu_report import processes

    def with_sections(*given, minutes=8.0, rates=()):
        monkeypatch.setattr(processes, "functions", lambda: {one.name: function for one, function in given})
        bench = dry_bench(tmp_path, is_dry=False)
        bench.rates = dict(rates)
        path = tmp_path / "gpu_report.jsonl"
        (*_, lines) = processes.run(bench, [one for one, _ in given], minutes, HEADER, path)
        assert read(path) == lines
        return lines
    return with_sections


def section(name, function, *goals, seconds=10):
    return Section(name, "", seconds, goals), function


def outcomes(lines):
    return [(line["goal"], line["case"], line["status"]) for line in lines]


def test_what_a_section_raises_is_a_record_of_each_goal_it_did_not_come_to(run):
    def fails(bench):
        yield Record("G1", "uniform", 1.0, 1.0)
        raise RuntimeError("no such kernel\nmore")

    lines = run(section("first", fails, "G1", "G1-ragged", "G1b"), section("second", works, "G7"))
    assert outcomes(lines) == [
        ("G1", "uniform", "measured"), ("G1-ragged", "first", FAILED), ("G1b", "first", FAILED),
        ("fact", "first", FAILED), ("G7", "latency", "measured")]
    assert lines[1]["note"] == "first: RuntimeError: no such kernel"


def works(bench):
    yield Record("G7", "latency", 1.0, 1.0)


def test_an_error_that_stays_in_its_process_costs_one_section(run, monkeypatch):
    """After an illegal access, each call to the device fails, until the process ends."""
    import torch

    from tests.benchmarks.gpu_report import correctness

    empty, lost = torch.empty, []

    def illegal(*_, **__):
        lost.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", lambda *given, **more: illegal() if lost else empty(*given, **more))
    monkeypatch.setattr(correctness, "CHECKS", {
        "philox": lambda bench: 0.0, "rms_norm": illegal, "layer_norm": lambda bench: float(torch.empty(1).sum())})

    def engine(bench):
        yield Record("G7", "latency", float(torch.empty(1).numel()), 1.0)

    lines = run(section("correctness", correctness.run, "correctness", seconds=30), section("latency", engine, "G7"))
    assert outcomes(lines) == [("correctness", "philox", "measured"), ("correctness", "rms_norm", FAILED),
                               ("correctness", "layer_norm", FAILED), ("G7", "latency", "measured")]
    assert "rms_norm" in lines[3]["note"] and lines[3]["met"] is None


def test_the_parent_never_uses_the_device(monkeypatch, tmp_path, capfd):
    """Its children could not use it then."""
    import torch

    from tests.benchmarks.gpu_report.__main__ import main

    parent = os.getpid()

    def is_available():
        assert os.getpid() != parent
        return False

    for module, name in ((torch.accelerator, "is_available"), (torch.cuda, "is_available"), (torch.cuda, "_lazy_init")):
        monkeypatch.setattr(module, name, is_available)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "torch finds no GPU" in capfd.readouterr().err and not list((tmp_path / "out").iterdir())


def refused(capsys, *given):
    """Return the one line on stderr of a refused command line."""
    from tests.benchmarks.gpu_report.__main__ import main

    try:
        status = main(given)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


LONG = "a" * 300                         # longer than a name of a file may be


@pytest.mark.parametrize("given, option", [
    *((f"--dry-run --out {place}", "--out") for place in ("FILE", "FILE/x", "/proc/x", "''", LONG, "REPORT")),
    *((f"--workload {place}", "--workload") for place in ("FOLDER", "FILE/x", "/proc/x", LONG, "''")),
    *((f"--dry-run --rates {place}", "--rates") for place in ("FILE", "FILE/x", "none", "''", "FOLDER", LONG, "DEEP")),
    *((f"--dry-run --peers {place}", "--peers") for place in ("FILE", "none", "''", "FOLDER", LONG)),
    ("--dry-run --rates REPORT/gpu_report.jsonl --out REPORT", "--out"), ("", "--out"),
    *((f"--dry-run --minutes {number}", "--minutes") for number in ("0", "-1", "1e-9", "nan", "inf", "x")),
    ("--dry-run --device cuda", "--device"), ("--dry-run --dtype float16", "--dtype"),
    ("--dry-run --commit ''", "--commit"),
    ("--out FOLDER/new --device banana", "--device"), ("--out FOLDER/new --device cpu", "--device"),
    ("--dry-run --peers FOLDER --section rates", "--peers"), ("--workload FOLDER/new --dry-run", "--dry-run"),
    *((f"--workload FOLDER/new {option} {value}", option) for option, value in (
        ("--out", "x"), ("--section", "rates"), ("--peers", "x"), ("--minutes", "1"), ("--device", "cuda"),
        ("--dtype", "float16"), ("--rates", "x"), ("--commit", "x")))])
def test_what_cannot_be_used_is_refused_by_name_and_nothing_is_written(given, option, tmp_path, monkeypatch, capsys):
    from tests.benchmarks.gpu_report import dry_run

    file, folder, earlier, deep = (tmp_path / name for name in ("a file", "a folder", "a report", "deep"))
    folder.mkdir()
    earlier.mkdir()
    deep.write_text("[" * 100_000)
    for path in (file, earlier / "gpu_report.jsonl"):
        path.write_text("kept")
    before = sorted(path for path in tmp_path.rglob("*") if path != folder / "new")
    monkeypatch.setattr(dry_run, "interpret_kernels", lambda: None)
    places = {"FILE": file, "FOLDER": folder, "REPORT": earlier, "DEEP": deep}
    error = refused(capsys, *(re.sub("|".join(places), lambda found: str(places[found[0]]), one)
                              for one in shlex.split(given)))
    assert option in error and re.search("expected|leave it out|missing|not a number", error)
    assert sorted(path for path in tmp_path.rglob("*") if path != folder / "new") == before
    assert file.read_text() == (earlier / "gpu_report.jsonl").read_text() == "kept" and not list(folder.glob("new/*"))


def test_ctrl_c_ends_a_report_and_its_section_without_a_traceback(tmp_path):
    """The terminal sends the signal to every process of the program."""
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], cwd=Path(__file__).parents[3], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    child = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in printed and "interrupted" in printed
    until(lambda: has_ended(child))


def test_sections_of_several_options_all_run():
    from tests.benchmarks.gpu_report.__main__ import parse_options

    assert parse_options(["--dry-run", "--section", "host-time", "--section", "rates", "idle"]).section == [
        "host-time", "rates", "idle"]


def test_after_a_lost_device_no_further_kernel_is_compared(run, monkeypatch):
    from tests.benchmarks.gpu_report import correctness, device_clock

    def fails(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device_clock.DryClock, "synchronize", fails)
    monkeypatch.setattr(correctness, "CHECKS", {"rms_norm": fails, "layer_norm": lambda bench: 0.0})
    lines = run(section("correctness", correctness.run, "correctness", seconds=30))
    assert outcomes(lines) == [("correctness", "rms_norm", FAILED), ("fact", "correctness", FAILED)]
    assert "lost" in lines[1]["note"]


@pytest.mark.parametrize("ends, grace_seconds, expected", [
    (lambda: time.sleep(600), 2.0, "killed at its limit"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 60, "SIGKILL"), (lambda: os._exit(3), 60, "status 3")])
def test_a_process_that_hangs_or_ends_costs_what_it_has_not_reported(run, monkeypatch, ends, grace_seconds, expected):
    from tests.benchmarks.gpu_report import processes

    monkeypatch.setattr(processes, "START_SECONDS", 0.0)
    monkeypatch.setattr(processes, "GRACE_SECONDS", grace_seconds)
    monkeypatch.setattr(processes, "DUMP_SECONDS", 0.1)

    def stops(bench):
        yield Record("G1", "uniform", 1.0, 1.0)
        with (bench.folder / "gpu_report.jsonl").open("a") as file:
            file.write('{"goal": "half a li')
        ends()
        yield Record("G1b", "never", 1.0, 1.0)

    lines = run(section("hangs", stops, "G1", "G1b", seconds=0), section("latency", works, "G7"), minutes=11 / 60)
    assert outcomes(lines) == [("G1", "uniform", "measured"), ("G1b", "hangs", FAILED), ("fact", "hangs", FAILED),
                               ("G7", "latency", "measured")]
    assert expected in lines[1]["note"]


def test_a_section_that_needs_more_time_than_it_has_says_so_and_the_next_one_runs(run):
    def slow(bench):
        bench.require(20)
        yield Record("G9", "never", 1.0, 1.0)

    def quick(bench):
        assert 0 < bench.seconds_left <= 30
        yield from works(bench)

    lines = run(section("slow", slow, "G9"), section("quick", quick, "G7", seconds=20), minutes=0.5)
    assert outcomes(lines) == [("G9", "slow", NOT_REACHED), ("G7", "latency", "measured")]
    assert re.fullmatch(r"slow: (9|10) s were left; the measurement needs 20 s", lines[0]["note"])


def test_a_section_for_which_no_time_is_left_is_not_started(run):
    lines = run(section("first", works, "G7"), section("second", works, "G1"), minutes=0.01)
    assert outcomes(lines) == [("G7", "first", NOT_REACHED), ("G1", "second", NOT_REACHED)]


def test_a_section_may_use_what_those_before_it_left_but_not_the_budgets_of_those_after_it(run):
    def looks(bench):
        yield Record("fact", "seconds left", bench.seconds_left)

    def seconds_left(*budgets):
        return [line["numerator"] for line in run(*(
            section(f"section {number}", looks, "fact", seconds=seconds) for number, seconds in enumerate(budgets)),
            minutes=10)]

    # the tolerance is the time that starting three processes may take on a busy machine
    assert seconds_left(100, 100, 100, 0) == pytest.approx([400, 500, 600, 600], abs=45)
    assert seconds_left(400, 400, 400) == pytest.approx([400, 600, 600], abs=45)          # whole ones, in order


def test_rates_are_those_of_the_first_section_or_of_an_earlier_report(run):
    from tests.benchmarks.gpu_report.denominators import RATES, rates_of

    def measures(bench):
        for case, unit, _ in RATES.values():
            yield Record("denominator", case, 2.0, unit=unit)

    def compares(bench):
        yield Record("G1", "attention", bench.copy_bytes_s, 1.0)

    (line,) = run(section("decode-attention", compares, "G1"))
    assert line["status"] == NOT_REACHED and "--rates" in line["note"]
    *measured, line = run(section("rates", measures, "denominator"), section("decode-attention", compares, "G1"))
    assert line["numerator"] == 2e9
    rates = rates_of(measured, "some GPU")
    assert rates == {"copy_bytes_s": 2e9, "read_bytes_s": 2e9, "matmul_flop_s": 2e12}
    assert run(section("decode-attention", compares, "G1"), rates=rates) == [line]
    damaged = [{**line, "numerator": 0.0} for line in measured]
    for lines, device in (([], "some GPU"), (measured[:1], "some GPU"), (measured, "another GPU"),
                          (damaged, "some GPU")):
        with pytest.raises(ValueError, match="expected"):
            rates_of(lines, device)


@pytest.mark.parametrize("dtype, allowed", [("bfloat16", 1e-2), ("float16", 2e-3), ("float32", 1e-4)])
def test_a_result_that_is_rounded_once_is_within_the_allowed_error(tmp_path, dtype, allowed):
    import torch

    from tests.benchmarks.gpu_report.bench import Bench
    from tests.benchmarks.gpu_report.device_clock import DryClock
    from tests.benchmarks.gpu_report.pages import relative_error

    bench = Bench(DryClock(torch.device("cpu")), getattr(torch, dtype), tmp_path)
    assert bench.allowed_error == allowed
    values = bench.normal(4096, dtype=torch.float64)
    assert relative_error(values.to(bench.dtype), values) < bench.allowed_error


def test_nothing_is_judged_where_a_kernel_is_wrong(run):
    def wrong(bench):
        yield Record("correctness", "rms_norm", status=FAILED, note="the result is wrong")

    def fast(bench):
        yield Record("G3", "8B", 1.0, 1.0, note="eager")

    *_, line = run(section("correctness", wrong, "correctness"), section("large-steps", fast, "G3"))
    assert line["met"] is None and line["note"] == "wrong kernels: rms_norm; eager"
    assert run(section("large-steps", fast, "G3"))[0]["met"] is True


# ---------------------------------------------------------------------- graphs


def test_an_engine_whose_graphs_are_refused_is_measured_without_and_says_why(tmp_path):
    from tests.benchmarks.gpu_report.engines import engine, graphless
    from tests.benchmarks.gpu_report.shapes import TINY

    bench = dry_bench(tmp_path)
    with engine(bench, TINY, max_batch=2) as made:
        assert made.label == "eager"
        assert made.note.startswith("no graphs were captured: cuda_graphs is True, but the device is cpu")
        assert len(made.generate(2, 4, 1).receipts) == 2
    assert graphless(bench, TINY).read_text() == made.note
    with engine(bench, TINY, max_batch=2, graphs=False) as made:
        assert (made.label, made.note) == ("eager", "")


def test_a_run_is_labelled_by_the_number_of_captured_graphs(tmp_path):
    from tests.benchmarks.gpu_report.engines import Engine, MeasuredClient
    from tests.benchmarks.gpu_report.shapes import TINY

    reasons = ["cuda_graphs is True, but capturing a step raised RuntimeError: operation not permitted"]
    bench = dry_bench(tmp_path)
    for num_graphs, label, note in ((3, "graphs", ""), (0, "eager", f"no graphs were captured: {reasons[0]}")):
        client = MeasuredClient()
        client.return_stats(json.dumps({"Context Requests": 0, "Runtime GPU Memory Usage": 5,
                                        **({"Captured Graphs": num_graphs} if num_graphs else {})}))
        made = Engine(bench, None, client, TINY, 1.0)
        made.set_label(True, reasons)
        assert (made.label, made.note) == (label, note)


# ---------------------------------------------------------------------- figures computed from measurements


def test_the_least_time_of_a_step_is_that_of_its_bytes_and_operations():
    from types import SimpleNamespace

    from tests.benchmarks.gpu_report.shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, QWEN3_600M

    gpu = SimpleNamespace(copy_bytes_s=4.3e12, matmul_flop_s=790e12)
    assert LLAMA_135M.kv_bytes_per_token == 23_040 and LLAMA_8B.kv_bytes_per_token == 131_072
    # Milliseconds, calculated by hand for these rates.
    for shape, batch, context, expected in ((LLAMA_135M, 1, 1024, 0.068), (LLAMA_135M, 256, 512, 0.79),
                                            (LLAMA_1B, 1, 1024, 0.583), (LLAMA_8B, 32, 1024, 4.49),
                                            (LLAMA_8B, 256, 1024, 12.9), (QWEN3_600M, 256, 512, 3.88)):
        assert shape.least_step_seconds(gpu, batch, context) * 1e3 == pytest.approx(expected, rel=0.02)


def test_busy_time_counts_what_overlaps_once():
    from tests.benchmarks.gpu_report.device_clock import activity_of

    found = activity_of([(0.0, 10.0, "a"), (5.0, 12.0, "b"), (20.0, 30.0, "Memcpy HtoD (Pinned -> Device)"),
                         (22.0, 24.0, "c"), (40.0, 41.0, "Memset (Device)")])
    assert (found.busy_seconds, found.launches, found.uploads) == (pytest.approx(23e-6), 3, 1)
    assert found.gaps == pytest.approx([8e-6, 10e-6])
    assert found.kernels["b"] == (1, pytest.approx(7e-6)) and len(found.kernels) == 5


def test_a_step_is_listed_by_kernel():
    from types import SimpleNamespace

    from tests.benchmarks.gpu_report.device_clock import activity_of
    from tests.benchmarks.gpu_report.step_profile import MOST_KERNELS, by_kernel

    spans = [(100.0 * step + 2 * number, 100.0 * step + 2 * number + 1, name) for step in range(2)
             for number, name in enumerate(["decode"] * 3 + ["norm"] + [f"small {one}" for one in range(MOST_KERNELS)])]
    made = SimpleNamespace(label="graphs", shape=SimpleNamespace(name="a model"), note="")
    first, *rest, others, gaps = [record.line(HEADER, dry=False) for record in by_kernel(
        made, "2 of 3 tokens", activity_of(spans), 2, 100e-6)]
    assert (first["case"], first["numerator"], first["ratio"]) == ("graphs, a model, 2 of 3 tokens: decode", 3, 0.03)
    assert first["note"] == "3 a step, 1.00 us each" and len(rest) == MOST_KERNELS - 1
    assert others["case"].endswith(": other kernels") and others["note"] == "2 a step"
    assert gaps["numerator"] == (2 * 23 + 53) / 2 and gaps["note"].startswith("10 %: 1.00 us; 50 %: 1.00 us")


def test_steps_are_timed_where_the_whole_batch_generates():
    from batch_manager.tools.bench.errors import BenchmarkError
    from tests.benchmarks.gpu_report.engines import Served, Stamp

    def stamps(*rows):
        return [Stamp(seconds, generating, contexts, 0) for seconds, generating, contexts in rows]

    served = Served(stamps((0.0, 0, 2), (1.2, 2, 1), (1.5, 2, 0), (1.7, 2, 0), (2.0, 2, 0), (2.1, 2, 0), (9.0, 1, 0)),
                    {}, 9.0)
    assert served.step_seconds(2) == pytest.approx(0.2)
    assert served.generation_rate() == pytest.approx(6 / 0.6)
    with pytest.raises(BenchmarkError, match="no two consecutive steps"):
        served.step_seconds(3)


def test_the_worker_is_held_and_let_go(tmp_path):
    import threading

    from tests.benchmarks.gpu_report.engines import MeasuredClient

    client, text = MeasuredClient(), json.dumps({"Context Requests": 0, "Generation Requests": 2,
                                                 "Runtime GPU Memory Usage": 5})
    client.hold_when(lambda stamp: len(client.stamps) == 2)
    thread = threading.Thread(target=lambda: [client.return_stats(text) for _ in range(5)])
    thread.start()
    client.wait_until_held()
    assert len(client.stamps) == 2
    client.let_go_until(lambda stamp: len(client.stamps) == 4)
    client.wait_until_held()
    assert len(client.stamps) == 4 and thread.is_alive()
    client.let_go()
    thread.join(timeout=10)
    assert len(client.stamps) == 5 and client.stamps[0].gpu_bytes == 5


def test_the_headline_workload_is_that_of_the_goals():
    from tests.benchmarks.gpu_report.headline import GOOD_RATES, headline_workload

    workload = headline_workload()
    assert (workload["n"], workload["prompt_tokens"], workload["output_tokens"]) == (256, 142_827, 133_966)
    requests = workload["requests"]
    assert {len(one["prompt"]) for one in requests} | {one["max_tokens"] for one in requests} <= set(range(100, 1025))
    assert GOOD_RATES == {"H100": 18_500, "H200": 26_000}
    assert {name: GOALS[name].floor for name in ("G1", "G1-ragged", "G3", "G3b-1B", "G3b-135M", "G6-share")} == {
        "G1": 0.9, "G1-ragged": 0.85, "G3": 0.75, "G3b-1B": 0.6, "G3b-135M": 0.5, "G6-share": 0.66}


def test_the_least_time_of_the_headline_workload_is_that_of_its_steps():
    from types import SimpleNamespace

    from tests.benchmarks.gpu_report.headline import least_seconds
    from tests.benchmarks.gpu_report.shapes import QWEN3_600M

    gpu = SimpleNamespace(copy_bytes_s=4.3e12, matmul_flop_s=790e12)
    lengths = [(100, 3), (50, 2)]
    of_prompts = 2 * (QWEN3_600M.matrix_entries - 151_936 * 1024) * 150 / 790e12
    steps = [QWEN3_600M.least_step_seconds(gpu, 1, 101 + 51) - QWEN3_600M.least_matrix_seconds(gpu, 1)
             + QWEN3_600M.least_matrix_seconds(gpu, 2), QWEN3_600M.least_step_seconds(gpu, 1, 102)]
    assert least_seconds(gpu, QWEN3_600M, lengths) == pytest.approx(of_prompts + sum(steps))


def test_results_of_peers_are_those_of_the_same_workload(tmp_path):
    from tests.benchmarks.gpu_report.headline import headline_workload, peer_results
    from tests.benchmarks.gpu_report.shapes import TINY

    workload = headline_workload(TINY, 3, 4, 9)
    assert headline_workload(TINY, 3, 4, 9) == workload
    good = {"peer": "vllm", "variant": "eager", "workload": "headline.json", "n": 3, "wrong_length": 0,
            "prompt_tokens": workload["prompt_tokens"], "output_tokens": workload["output_tokens"], "output_tok_s": 7.0}
    for name, result in {"a": good, "b": good | {"n": 4}, "c": good | {"workload": "offline.json"},
                         "d": good | {"wrong_length": 1}, "e": [1]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert list(peer_results(tmp_path, workload)) == [("vllm eager", 7.0)]
    assert list(peer_results(None, workload)) == []
