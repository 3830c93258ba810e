"""`batch-manager compare --first --second` gives the right ratio of each pair of runs, and the right conclusions."""

import json
import math

import pytest

from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench.measurement import Measurement
from batch_manager.tools.bench.options import parse_options
from batch_manager.tools.compare.__main__ import Comparison, ComparisonError, compare, main, read_results
from batch_manager.tools.workload import Lengths, make_workload


def result(peer="a", **figures):
    return {"peer": peer, "variant": "", "workload": "offline.json", "n": 64, "threads": 2, "precision": "bf16",
            "prompt_tokens": 100, "output_tokens": 50, "wrong_length": 0,
            "cpu": {"foreign_cores": 0.01, "steal_cores": 0.0}, **figures}


def results(peer, figure, values):
    return [result(peer, **{figure: value}) for value in values]


def write(folder, name, values):
    paths = []
    for number, value in enumerate(values):
        paths.append(folder / f"{name}{number}.json")
        paths[-1].write_text(json.dumps(value))
    return paths


def test_rates_and_times_are_both_better_above_one():
    (rate,) = compare(results("a", "output_tok_s", [300.0]), results("b", "output_tok_s", [200.0]))
    (time,) = compare(results("a", "itl_ms_p50", [20.0]), results("b", "itl_ms_p50", [30.0]))
    assert rate.ratio == time.ratio == 1.5
    assert (time.first, time.second) == (20.0, 30.0)


def test_ratios_are_taken_pair_by_pair():
    (one,) = compare(results("a", "output_tok_s", [100.0, 220.0, 330.0]),
                     results("b", "output_tok_s", [100.0, 200.0, 300.0]))
    assert one.ratios == (1.0, 1.1, 1.1)
    assert one.record() == {"figure": "output_tok_s", "first": 220.0, "second": 200.0, "ratio": 1.1,
                            "smallest_ratio": 1.0, "largest_ratio": 1.1, "pairs": 3, "exceeds_spread": False}


@pytest.mark.parametrize("ratios, expected", [
    ((1.2, 1.22, 1.25), True),
    ((0.8, 0.82, 0.85), True),
    ((1.05, 1.1, 1.3), False),
    ((0.95, 1.02, 1.04), False),
    ((1.0, 1.0), False),
    ((2.0,), None),
])
def test_a_difference_counts_when_it_is_larger_than_the_spread(ratios, expected):
    assert Comparison("output_tok_s", math.nan, math.nan, ratios).exceeds_spread is expected


@pytest.mark.parametrize("change", [{"workload": "single.json"}, {"n": 8}, {"output_tokens": 51},
                                    {"precision": "fp32"}, {"threads": 1}])
def test_different_workloads_are_refused(change):
    (name,) = change
    with pytest.raises(ComparisonError, match=f"{name} differs"):
        compare([result(output_tok_s=1.0)], [result("b", output_tok_s=1.0) | change])


def test_sides_of_different_length_and_figures_that_nobody_has_are_refused():
    one = result(output_tok_s=1.0)
    with pytest.raises(ComparisonError, match="2 results of the first program and 1"):
        compare([one, one], [one])
    with pytest.raises(ComparisonError, match="no figure is positive in all runs; expected one of itl_ms_p50 to be;"):
        compare([one], [one], ["itl_ms_p50"])


def test_files_that_are_no_results_are_refused_by_name(tmp_path):
    bad = write(tmp_path, "bad", [result(output_tok_s=1.0, wrong_length=3), {"peer": "a"}])
    with pytest.raises(ComparisonError, match="3 outputs of the wrong length"):
        read_results(bad[:1])
    with pytest.raises(ComparisonError, match=r"bad1.json does not have the fields n, output_tokens"):
        read_results(bad[1:])
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(ComparisonError, match="cannot be read"):
        read_results([tmp_path / "text"])


def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys):
    ours = write(tmp_path, "a", results("ours", "output_tok_s", [130.0, 120.0]))
    theirs = write(tmp_path, "b", [result("theirs", output_tok_s=100.0),
                                   result("theirs", output_tok_s=100.0, cpu={"foreign_cores": 0.5})])
    out = tmp_path / "out.json"
    assert main(["--first", *map(str, ours), "--second", *map(str, theirs), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| output_tok_s | 125 | 100 | 1.250 (1.200 to 1.300) | yes |" in printed
    assert "1 of 2 runs of theirs was disturbed" in printed and "runs of ours" not in printed
    assert main(["--first", str(ours[0]), "--second", str(theirs[1])]) == 0
    printed = capsys.readouterr().out
    assert ": 1 pair of runs; " in printed and "1 of 1 run of theirs was disturbed" in printed
    written = json.loads(out.read_text())
    assert written["disturbed"] == [0, 1]
    assert [one["exceeds_spread"] for one in written["figures"]] == [True]

    assert main(["--first", *map(str, ours), "--second", str(theirs[0])]) == 2
    assert "pass the same number of each" in capsys.readouterr().err
    assert main(["--first", str(ours[0]), "--second", str(theirs[0]), "--figure", "load_s"]) == 2
    assert "--figure is load_s; with --first and --second, expected output_tok_s" in capsys.readouterr().err


def test_it_reads_what_the_benchmark_writes(tmp_path):
    workload = make_workload(count=2, vocab_size=500, prompts=Lengths(8, 0.1, 4, 9), outputs=Lengths(4, 0.1, 3, 5))
    options = parse_options(["--model", "none", "--workload", "w.json", "--out", "o.json", "--max-batch-size", "2",
                             "--tokens-per-block", "8", "--warm-up", "0"])
    runs = [Measurement(options, workload, Parts(backend=ScriptedBackend(num_blocks=64, tokens_per_block=8))).run()
            for _ in range(2)]
    read = read_results(write(tmp_path, "run", runs))
    found = {one.figure for one in compare(read[:1], read[1:])}
    assert {"output_tok_s", "total_tok_s", "ttft_ms_p50", "itl_ms_p50", "e2e_ms_p99", "peak_rss_mb"} <= found
