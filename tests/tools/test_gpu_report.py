"""Without a GPU, all code of the GPU report runs, each line of its output is a valid record, and so is each failure."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import make_dataclass
from pathlib import Path

import numpy as np
import pytest

from batch_manager.tools.gpu_report.goals import ALL, GOALS, family
from batch_manager.tools.gpu_report.records import DRY, FAILED, NOT_REACHED, Record, check, read

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


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Return (records, output folder, stderr) of a dry run in its own process. The run measures a peer's attention too.

    The run leaves out transformers, which takes seconds to import and has its own test.
    """
    folder = tmp_path_factory.mktemp("report")
    peers = folder / "peers"
    peers.mkdir()
    (peers / "attention.py").write_text(PEER_ATTENTION)
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "batch_manager.tools.gpu_report", "--out", str(folder),
         "--dry-run", "--peers", str(peers), "--goal", *sorted({family(name) for name in GOALS} - {"G6b"}), "facts"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read(folder / "gpu_report.jsonl"), folder, done.stderr


def test_a_dry_run_comes_to_every_goal_and_has_no_numbers(dry_run):
    lines, *_ = dry_run
    assert {line["goal"] for line in lines} == set(ALL) - {"G6b"}
    for line in lines:
        assert line["status"] == DRY, line
        assert line["ratio"] is None and line["numerator"] is None and line["met"] is None
        assert line["device"].startswith("dry run") and line["versions"].keys() >= {"batch_manager", "torch", "triton"}


def test_every_goal_of_an_engine_is_measured_with_graphs_before_anything_without(dry_run):
    lines, *_ = dry_run
    labels = [(line["goal"], line["case"].partition(",")[0].partition(":")[0]) for line in lines]
    engines = ["G3", "G3b-135M", "G3b-1B", "G4", "G4-share", "G8", "G8-overlap", "G6", "G7", "G9"]
    first_eager = next(number for number, (_, label) in enumerate(labels) if label == "eager")
    assert [goal for goal in engines if (goal, "graphs") not in labels[:first_eager]] == []
    assert {goal for goal, label in labels if label == "eager"} == {"G3b-135M", "G3b-1B"}     # the rest on a GPU only
    in_order = list(dict.fromkeys(goal for goal, _ in labels[:first_eager]))
    assert in_order.index("G3") < in_order.index("G3b-135M") < in_order.index("G9")


def test_the_estimates_of_every_section_fit_its_budget_and_all_fit_eight_minutes(dry_run):
    from batch_manager.tools.gpu_report.sections import SECTIONS

    *_, printed = dry_run
    used = {name: (float(seconds), float(budget)) for name, seconds, budget in re.findall(
        r"^-- (.*): ([\d.]+) s of (\d+) s$", printed, re.MULTILINE)}
    assert list(used) == [section.name for section in SECTIONS]
    with_budget = [section for section in SECTIONS if section.seconds]
    assert sum(section.seconds for section in with_budget) <= 8 * 60
    assert sum(used[section.name][0] for section in with_budget) <= 8 * 60
    for section in with_budget:
        seconds, budget = used[section.name]
        assert budget == section.seconds
        # The last one uses all the time that is left.
        assert seconds <= budget or section is with_budget[-1], section.name
    assert {family(name) for name in GOALS} - {"settings"} == {
        name for section in with_budget for name in section.goals}
    assert re.search(r"^8B decode steps +70 s +ends by", printed, re.MULTILINE)


def test_every_kernel_is_compared_by_value(dry_run):
    lines, *_ = dry_run
    kernels = {line["case"].partition(" ")[0] for line in lines if line["goal"] == "correctness"}
    assert kernels == {
        "activation", "ban_ngrams", "ban_words", "beam_topk", "deterministic_linear", "fused_linear",
        "gated_activation", "layer_norm", "match_stop_words", "paged_attention_context", "paged_attention_decode",
        "paged_attention_merge", "philox", "prepare_step", "rms_norm", "rope_kv_append", "sample_token",
        "token_bitmask", "token_penalties"}


def test_it_compares_with_the_peer_and_leaves_the_workload_for_others(dry_run):
    lines, folder, _ = dry_run
    notes = {line["goal"]: line["note"] for line in lines}
    assert notes["G1c"] == notes["G2b"] == notes["G2b-64"] == "against a peer"
    workload = json.loads((folder / "headline.json").read_text())
    assert workload["output_tokens"] == sum(request["max_tokens"] for request in workload["requests"])
    assert (folder / "gpu_report.md").read_text().count("\n| G") >= len(GOALS) - 1


def test_the_fastest_settings_are_written_as_code(dry_run):
    lines, folder, _ = dry_run
    text = (folder / "gpu_settings.md").read_text()
    for function in ("decode_settings", "context_settings", "settings_of_few_rows", "decode_work_list"):
        assert f"`{function}` in triton_kernels/" in text
    cases = [line["case"] for line in lines if line["goal"] == "settings"]
    assert len(cases) == len(set(cases)) >= 14 and "| rate | predicted |" in text


@pytest.mark.parametrize("names, chosen", [(("block_size",), "block_size"), (("page_size",), "page_size"),
                                           (("page_size", "block_size"), "page_size")])
def test_the_page_size_of_transformers_is_given_by_the_name_that_this_release_has(names, chosen, monkeypatch):
    from types import SimpleNamespace

    from batch_manager.tools.gpu_report.transformers_peer import _sizes

    config = make_dataclass("Config", [*names, "num_blocks", "max_batch_tokens"], init=False)
    config.__init__ = lambda self, **given: vars(self).update(given)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(ContinuousBatchingConfig=config))
    assert vars(_sizes(SimpleNamespace(is_dry=True))["continuous_batching_config"]) == {
        chosen: 16, "num_blocks": 16, "max_batch_tokens": 32}
    assert _sizes(SimpleNamespace(is_dry=False)) == {}


def test_transformers_serves_the_same_requests(tmp_path):
    import torch

    pytest.importorskip("transformers")
    from batch_manager.tools.gpu_report.bench import Bench
    from batch_manager.tools.gpu_report.device_clock import DryClock
    from batch_manager.tools.gpu_report.headline import _against_transformers
    from batch_manager.tools.gpu_report.shapes import TINY

    bench = Bench(DryClock(torch.device("cpu")), torch.float32, tmp_path, tmp_path)
    requests = [{"id": 0, "prompt": [3, 4, 5], "max_tokens": 2}, {"id": 1, "prompt": [6], "max_tokens": 4}]
    record = _against_transformers(bench, "2 requests", 100.0, 0.0, TINY, requests)
    assert record.status == "measured", record.note
    assert record.denominator > 0 and "stopped" not in record.note
    broken = _against_transformers(bench, "2 requests", 100.0, 0.0, TINY, [{"id": 0, "prompt": [3]}])
    assert broken.status == FAILED and "KeyError" in broken.note


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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the function `run(*sections, minutes=8, goals=())`, which returns the records of a report.

    DryClock replaces the device's clock.
    """
    import torch

    from batch_manager.tools.gpu_report import sections as listed
    from batch_manager.tools.gpu_report.__main__ import run
    from batch_manager.tools.gpu_report.bench import Bench
    from batch_manager.tools.gpu_report.device_clock import DryClock

    def with_sections(*sections, minutes=8.0, goals=(), is_dry=False, rates=()):
        monkeypatch.setattr(listed, "SECTIONS", sections)
        clock = DryClock(torch.device("cpu"))
        clock.is_dry = is_dry
        return list(run(Bench(clock, torch.float32, tmp_path, tmp_path, goals=goals, rates=dict(rates)), minutes))
    return with_sections


def section(name, function, *goals, seconds=10, needed_by=()):
    from batch_manager.tools.gpu_report.sections import Section

    return Section(name, function, seconds, goals, needed_by)


def test_what_a_section_raises_is_a_record_of_each_goal_it_did_not_come_to(run):
    def fails(bench):
        yield Record("G1", "uniform", 1.0, 1.0)
        raise RuntimeError("no such kernel\nmore")

    def works(bench):
        yield Record("G7", "latency", 1.0, 1.0)

    records = run(section("first", fails, "G1", "G1b"), section("second", works, "G7"))
    assert [(one.goal, one.case, one.status) for one in records] == [
        ("G1", "uniform", "measured"), ("G1-ragged", "first", FAILED), ("G1b", "first", FAILED),
        ("fact", "first", FAILED), ("G7", "latency", "measured")]
    assert records[1].note == "first: RuntimeError: no such kernel"


def test_a_section_that_needs_more_time_than_it_has_says_so_and_the_next_one_runs(run):
    def slow(bench):
        bench.require(20)
        yield Record("G9", "never", 1.0, 1.0)

    def quick(bench):
        assert 0 < bench.seconds_left <= 30
        yield Record("G7", "latency", 1.0, 1.0)

    records = run(section("slow", slow, "G9"), section("quick", quick, "G7", seconds=20), minutes=0.5)
    assert [(one.goal, one.status) for one in records] == [("G9", NOT_REACHED), ("G7", "measured")]
    assert records[0].note == "slow: 10 s were left; the measurement needs 20 s"


def test_a_section_may_use_what_those_before_it_left_but_not_the_budgets_of_those_after_it(run):
    seen = []

    def looks(bench):
        seen.append(bench.deadline - time.monotonic())
        yield from ()

    run(*(section(name, looks, "G7", seconds=10) for name in "abc"), section("rest", looks, "G7", seconds=0), minutes=1)
    assert seen == pytest.approx([40, 50, 60, 60], abs=0.5)
    seen.clear()
    run(*(section(name, looks, "G7", seconds=40) for name in "abc"), minutes=1)          # whole ones, in order
    assert seen == pytest.approx([40, 60, 60], abs=0.5)


def test_without_rates_a_section_is_not_reached_and_with_those_of_an_earlier_report_it_is(run, tmp_path):
    from batch_manager.tools.gpu_report.denominators import RATES, rates_of
    from batch_manager.tools.gpu_report.denominators import run as denominators

    def compares(bench):
        yield Record("G1", "attention", bench.copy_bytes_s, 1.0)

    (record,) = run(section("attention", compares, "G1b", "G1", seconds=10))[:1]
    assert record.status == NOT_REACHED and "--rates" in record.note
    header = {"device": "a GPU", "versions": {}, "commit": "", "date": ""}
    lines = [Record("denominator", case, 2.0, unit=unit).line(header, dry=False) for case, unit, _ in RATES.values()]
    report = tmp_path / "gpu_report.jsonl"
    report.write_text("\n".join(map(json.dumps, lines)))
    rates = rates_of(report, "a GPU")
    assert rates == {"copy_bytes_s": 2e9, "read_bytes_s": 2e9, "matmul_flop_s": 2e12}
    assert run(section("rates", denominators, needed_by=("G1",)), section("attention", compares, "G1"),
               goals=("G1",), rates=rates)[0].numerator == 2e9
    for text, device in ((lines[0], "a GPU"), (lines[0] | {"device": "b"}, "a GPU"), ({}, "a GPU")):
        report.write_text(json.dumps(text))
        with pytest.raises(ValueError, match="expected"):
            rates_of(report, device)


@pytest.mark.parametrize("dtype, allowed", [("bfloat16", 1e-2), ("float16", 2e-3), ("float32", 1e-4)])
def test_a_result_that_is_rounded_once_is_within_the_allowed_error(tmp_path, dtype, allowed):
    import torch

    from batch_manager.tools.gpu_report.bench import Bench
    from batch_manager.tools.gpu_report.device_clock import DryClock
    from batch_manager.tools.gpu_report.pages import relative_error

    bench = Bench(DryClock(torch.device("cpu")), getattr(torch, dtype), tmp_path, tmp_path)
    assert bench.allowed_error == allowed
    values = bench.normal(4096, dtype=torch.float64)
    assert relative_error(values.to(bench.dtype), values) < bench.allowed_error


def test_only_what_was_asked_for_runs_and_what_goals_rest_on(run):
    def names(name):
        def found(bench):
            yield Record("fact", name, 1.0)
        return found

    records = run(section("base", names("base"), needed_by=("G7",)), section("one", names("one"), "G1", "G1b"),
                  section("two", names("two"), "G7"), goals=("G7",))
    assert [one.case for one in records] == ["base", "two"]


def test_nothing_is_judged_where_a_kernel_is_wrong(run):
    def wrong(bench):
        yield Record("correctness", "rms_norm", status=FAILED, note="the result is wrong")

    def fast(bench):
        yield Record("G3", "8B", 1.0, 1.0, note="eager")

    records = run(section("correctness", wrong), section("steps", fast, "G3"))
    assert records[1].met is None and records[1].note == "wrong kernels: rms_norm; eager"
    assert run(section("steps", fast, "G3"))[0].met is True


def test_goals_are_chosen_by_their_families():
    assert {family(name) for name in GOALS} == {
        "G1", "G1b", "G1c", "G2", "G2b", "G3", "G3b", "G4", "G5", "G5b", "G6", "G6b", "G7", "G8", "G9",
        "settings"}


# ---------------------------------------------------------------------- graphs


def test_an_engine_whose_graphs_are_refused_is_measured_without_and_says_why(tmp_path):
    import torch

    from batch_manager.tools.gpu_report.bench import Bench
    from batch_manager.tools.gpu_report.device_clock import DryClock
    from batch_manager.tools.gpu_report.engines import engine
    from batch_manager.tools.gpu_report.shapes import TINY

    bench = Bench(DryClock(torch.device("cpu")), torch.float32, tmp_path, tmp_path)
    with engine(bench, TINY, max_batch=2) as made:
        assert made.label == "eager"
        assert made.note.startswith("no graphs were captured: cuda_graphs is True, but the device is cpu")
        assert len(made.generate(2, 4, 1).receipts) == 2
    assert bench.without_graphs == {"tiny": made.note}
    with engine(bench, TINY, max_batch=2, graphs=False) as made:
        assert (made.label, made.note) == ("eager", "")


def test_a_run_is_labelled_by_the_number_of_captured_graphs(tmp_path):
    import torch

    from batch_manager.tools.gpu_report.bench import Bench
    from batch_manager.tools.gpu_report.device_clock import DryClock
    from batch_manager.tools.gpu_report.engines import Engine, MeasuredClient
    from batch_manager.tools.gpu_report.shapes import TINY

    reasons = ["cuda_graphs is True, but capturing a step raised RuntimeError: operation not permitted"]
    bench = Bench(DryClock(torch.device("cpu")), torch.float32, tmp_path, tmp_path)
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

    from batch_manager.tools.gpu_report.shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, QWEN3_600M

    gpu = SimpleNamespace(copy_bytes_s=4.3e12, matmul_flop_s=790e12)
    assert LLAMA_135M.kv_bytes_per_token == 23_040 and LLAMA_8B.kv_bytes_per_token == 131_072
    # Milliseconds, calculated by hand for these rates.
    for shape, batch, context, expected in ((LLAMA_135M, 1, 1024, 0.068), (LLAMA_135M, 256, 512, 0.79),
                                            (LLAMA_1B, 1, 1024, 0.583), (LLAMA_8B, 32, 1024, 4.49),
                                            (LLAMA_8B, 256, 1024, 12.9), (QWEN3_600M, 256, 512, 3.88)):
        assert shape.least_step_seconds(gpu, batch, context) * 1e3 == pytest.approx(expected, rel=0.02)


def test_busy_time_counts_what_overlaps_once():
    from batch_manager.tools.gpu_report.device_clock import activity_of

    found = activity_of([(0.0, 10.0, "a"), (5.0, 12.0, "b"), (20.0, 30.0, "Memcpy HtoD (Pinned -> Device)"),
                         (22.0, 24.0, "c"), (40.0, 41.0, "Memset (Device)")])
    assert (found.busy_seconds, found.launches, found.uploads) == (pytest.approx(23e-6), 3, 1)


def test_steps_are_timed_where_the_whole_batch_generates():
    from batch_manager.tools.bench.errors import BenchmarkError
    from batch_manager.tools.gpu_report.engines import Served, Stamp

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

    from batch_manager.tools.gpu_report.engines import MeasuredClient

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


def test_results_of_peers_are_those_of_the_same_workload(tmp_path):
    from batch_manager.tools.gpu_report.headline import headline_workload, peer_results
    from batch_manager.tools.gpu_report.shapes import TINY

    workload = headline_workload(TINY, 3, 4, 9)
    assert headline_workload(TINY, 3, 4, 9) == workload
    good = {"peer": "vllm", "variant": "eager", "workload": "headline.json", "n": 3, "wrong_length": 0,
            "prompt_tokens": workload["prompt_tokens"], "output_tokens": workload["output_tokens"], "output_tok_s": 7.0}
    for name, result in {"a": good, "b": good | {"n": 4}, "c": good | {"workload": "offline.json"},
                         "d": good | {"wrong_length": 1}, "e": [1]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert list(peer_results(tmp_path, workload)) == [("vllm eager", 7.0)]
    assert list(peer_results(None, workload)) == []
