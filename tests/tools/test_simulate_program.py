"""The program `batch-manager simulate` fits, simulates, sweeps, and refuses wrong input."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from batch_manager.stats.trace import IterationTrace, TraceFile
from batch_manager.tools.__main__ import main as batch_manager
from batch_manager.tools.bench.result import read_result
from batch_manager.tools.compare.results import compare_results
from batch_manager.tools.simulate import study
from batch_manager.tools.simulate.__main__ import main
from batch_manager.tools.simulate.cost_model import CostModel
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.workload import Lengths, make_workload
from tests.tools.simulated import COST, lengths
from tests.tools.test_simulate import ENGINE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulate")
    workload = make_workload(count=24, vocab_size=1000, prompts=Lengths(60, 0.8, 4, 200),
                             outputs=Lengths(20, 0.5, 2, 60), rate=4.0)
    (folder / "w.json").write_text(json.dumps(workload))
    with TraceFile(folder / "run.trace") as trace:
        simulate(lengths([n * 0.05 for n in range(40)], [50] * 40, [20] * 40), ENGINE, COST, trace=trace)
    assert main(["--fit", str(folder / "run.trace"), "--out", str(folder / "cost.json"), "--report", "none"]) == 0
    return folder


@pytest.fixture
def call(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda *more: main(["--cost", "cost.json", "--workload", "w.json", *more])


def test_a_run_is_told_and_written(call, folder, capsys):
    assert call("--out", "a.json", "--output-csv", "a.csv", "--variant", "first") == 0
    told = capsys.readouterr().out
    assert "24 requests" in told and "time in steps" in told and "extrapolated: up to" in told
    result = read_result(folder / "a.json")
    assert result["kind"] == "run" and result["n"] == 24 and result["peer"] == "batch_manager simulate"
    assert result["failed"] == 0 and result["ttft_ms_p99"] > 0 and result["scheduler"] == "guaranteed_no_evict"
    assert (folder / "a.csv").read_text().count("\n") == 2
    assert call("--out", "b.json", "--report", "json") == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == result["output_tokens"]
    lines = "\n".join(compare_results(folder / "a.json", folder / "b.json"))
    assert "1.000" in lines and "warning: variant differs" in lines


def test_a_seed_is_one_simulation(call, folder):
    for seed, name in ((1, "x.json"), (1, "y.json"), (2, "z.json")):
        assert call("--out", name, "--report", "none", "--scatter-seed", str(seed)) == 0
    x, y, z = (read_result(folder / name)["wall_s"] for name in ("x.json", "y.json", "z.json"))
    assert x == y != z


def test_a_sweep_marks_the_best_and_is_drawn(call, folder, capsys):
    assert call("--sweep", "max_batch_size=1,4,16", "--sweep", "policy=guaranteed_no_evict,max_utilization", "--out",
                "s.json", "--plot", "plots", "--slo-ttft-ms", "400") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split()[:2] == ["max_batch_size", "policy"] and sum(line.startswith("*") for line in told) == 1
    result = read_result(folder / "s.json")
    assert [point["settings"]["max_batch_size"] for point in result["points"]] == [1, 1, 4, 4, 16, 16]
    share = [point["goodput"]["share"] for point in result["points"]]
    assert share[0] < share[-1]
    for name in ("simulated-ttft.svg", "simulated-itl.svg"):
        assert (folder / "plots" / name).read_text().count("<circle") >= 6


@pytest.mark.parametrize("swept", [
    "request_rate=2,8", "concurrency=1,3", "replicas=1,2", "routing=round-robin,least-loaded", "block_reuse=on,off",
    "max_tokens_in_paged_kvcache=2048,4096", "tokens_per_block=16,32", "max_num_sequences=8,40",
    "chunked_context=on,off", "max_num_tokens=256,512"])
def test_everything_can_be_swept(call, swept, capsys):
    assert call("--sweep", swept, "--report", "json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 2 and all(point["output_tokens"] == points[0]["output_tokens"] for point in points)


def test_a_trace_can_be_read_by_the_other_tools(call, folder, capsys):
    assert call("--trace", "sim.trace", "--report", "none") == 0
    assert batch_manager(["trace", "why", "1", "sim.trace"]) == 0
    assert "request 1" in capsys.readouterr().out
    assert batch_manager(["draw", "sim.trace", "--html", "sim.html"]) == 0
    assert (folder / "sim.html").stat().st_size > 10_000


def test_made_up_traces_are_simulated_by_their_names(call, capsys):
    assert main(["--cost", "cost.json", "--workload", "sample:mooncake", "--num-requests", "20", "--max-input-tokens",
                 "600",
                 "--replicas", "2", "--routing", "longest-prefix", "--block-reuse", "--max-tokens-in-paged-kvcache",
                 "65536", "--report", "json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["n"] == 20 and result["reused_tokens"] > 0 and result["replicas"]["count"] == 2


@pytest.mark.parametrize("arguments, told", [
    (["--cost", "cost.json"], "--cost and --workload are needed"),
    (["--fit", "run.trace"], "without --out"),
    (["--fit", "run.trace", "--out", "c.json", "--workload", "w.json"], "simulates nothing"),
    (["--cost", "cost.json", "--workload", "w.json", "--find-saturation", "--find-replicas"], "leave one out"),
    (["--cost", "cost.json", "--workload", "w.json", "--find-saturation", "--request-rate", "2"], "leave one out"),
    (["--cost", "cost.json", "--workload", "w.json", "--find-replicas", "--sweep", "replicas=1,2"], "leave one out"),
    (["--cost", "cost.json", "--workload", "w.json", "--slo-share", "0.5"], "without a search"),
    (["--cost", "cost.json", "--workload", "w.json", "--find-replicas", "--slo-share", "0.5"], "without a bound"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "size=1"], "is not a sweep"),
    (["--cost", "cost.json", "--workload", "w.json", "--time-scale", "-1"], "--time-scale: -1 is out of range"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "max_batch_size=0"],
     "0 is too small; expected at least 1"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "request_rate=-1"], "-1 is not a rate; expected "),
    (["--cost", "cost.json", "--workload", "w.json", "--find-saturation", "--request-rate", "0"], "leave one out"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "max_batch_size=1000001"], "expected at most 1000000"),
    (["--cost", "cost.json", "--workload", "w.json", "--max-batch-size", "999999999999"],
     "--max-batch-size: 999999999999 is too large; expected at most 1000000"),
    (["--cost", "cost.json", "--workload", "w.json", "--max-num-sequences", "1000001"], "expected at most 1000000"),
    (["--cost", "cost.json", "--workload", "w.json", "--replicas", "10001"],
     "--replicas: 10001 is too large; expected at most 10000"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "policy=fast"], "has the value 'fast'"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "max_batch_size=2,2"], "a value twice"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "max_batch_size=2", "--sweep", "max_batch_size=4"],
     "twice"),
    (["--cost", "cost.json", "--workload", "w.json", "--sweep", "max_batch_size=2", "--trace", "t"],
     "--trace and --sweep"),
    *((["--cost", "cost.json", "--workload", "w.json", "--time-scale", "0.5", *load], "replaces the recorded times")
      for load in (["--concurrency", "2"], ["--request-rate", "0"], ["--sweep", "concurrency=1,2"],
                   ["--find-saturation"])),
    (["--cost", "cost.json", "--workload", "w.json", "--out", "no/such/folder"], "--out: no/such/folder"),
    (["--cost", "cost.json", "--workload", "w.json", "--plot", "p"], "without --sweep"),
    (["--cost", "cost.json", "--workload", "w.json", "--out", "w.json"], "--workload and --out both name w.json"),
    (["--cost", "cost.json", "--workload", "w.json", "--out", "./cost.json"], "--cost and --out both name"),
    (["--cost", "cost.json", "--workload", "w.json", "--out", "a", "--trace", "a"], "--out and --trace both name a"),
    (["--fit", "run.trace", "--out", "run.trace"], "--fit run.trace and --out both name run.trace")])
def test_wrong_arguments_are_refused(call, arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("arguments, told", [
    (["--cost", "none.json", "--workload", "w.json"], "none.json cannot be read"),
    (["--cost", "w.json", "--workload", "w.json"], "w.json is not a cost model"),
    (["--cost", "cost.json", "--workload", "none"], "none"),
    (["--cost", "cost.json", "--workload", "w.json", "--tokenizer", "t"], "--tokenizer is t; it has no effect on a "),
    (["--cost", "cost.json", "--workload", "w.json", "--output-tokens", "7"], "--output-tokens is 7; it has no effect"),
    (["--cost", "cost.json", "--workload", "run.trace"], "; set another format with --format"),
    (["--cost", "cost.json", "--workload", "cost.json"], "cost.json"),
    (["--cost", "cost.json", "--workload", "w.json", "--max-tokens-in-paged-kvcache", "3"], "which is 0 blocks"),
    (["--cost", "cost.json", "--workload", "w.json", "--max-tokens-in-paged-kvcache", "99999999999999"],
     "expected 1 to 10,000,000 blocks"),
    (["--cost", "cost.json", "--workload", "w.json", "--max-num-tokens", "8", "--trace", "t", "--out", "o"],
     "max_num_tokens is 8"),
    (["--cost", "cost.json", "--workload", "w.json", "--replicas", "10000", "--max-tokens-in-paged-kvcache",
      "640000000"], "10,000 replicas with 10,000,000 blocks and 32 requests each need about 14,901 GiB; expected at "),
    (["--fit", "w.json", "--out", "c.json"], "line 1 is not the header of a trace"),
    (["--fit", "none.trace", "--out", "c.json"], "none.trace")])
def test_wrong_files_and_settings_are_refused_and_leave_nothing(call, folder, arguments, told, capsys):
    before = sorted(path.name for path in folder.iterdir())
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert told in errors and "Traceback" not in errors
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("change, told", [
    ({"generation_s": {"constant": 1e308}}, "constant is 1e+308, not 0 to 1e+06 seconds"),
    ({"generation_s": {}, "mixed_s": {}, "host_s": {}}, "generation_s has no term above 0"),
    ({"mixed_s": {"constant": 0}}, "mixed_s has no term above 0"),
    ({"mixed_spread": [1, 1e308]}, "mixed_spread has the factor 1e+308, outside 0..1e+06")])
def test_a_cost_file_whose_times_cannot_be_true_is_refused(change, told, folder, capsys):
    record = json.loads((folder / "cost.json").read_text())
    (folder / "edited.json").write_text(json.dumps(record | change))
    assert main(["--cost", str(folder / "edited.json"), "--workload", str(folder / "w.json")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("error, words", [
    ({"median": 2.65}, "265.0% median"), ({"p90": 1.01}, "101.0% p90"), ({"total": -0.26}, "-26.0% of their total")])
def test_a_cost_model_with_a_large_error_is_refused(error, words, call, folder, capsys):
    record = json.loads((folder / "cost.json").read_text())
    record["error"] |= error
    (folder / "wrong.json").write_text(json.dumps(record))
    given = ["--cost", "wrong.json", "--workload", "w.json"]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert words in told and "expected at most 25% median" in told and "--max-fit-error" in told
    assert main([*given, "--max-fit-error", "300", "--out", "accepted.json"]) == 0
    assert words in capsys.readouterr().out
    stored = read_result(folder / "accepted.json")["cost"]
    assert words in stored["error"] and stored["step_error"] == record["error"]


def test_a_fit_with_a_large_error_is_refused_and_writes_nothing(folder, capsys):
    with TraceFile(folder / "odd.trace") as trace:
        simulate(lengths([n * 0.05 for n in range(40)], [50] * 40, [20] * 40), ENGINE,
                 replace(COST, generation_spread=(0.01, 0.1, 3.0), mixed_spread=(0.01, 0.1, 3.0)), trace=trace)
    assert main(["--fit", str(folder / "odd.trace"), "--out", str(folder / "odd.json")]) == 2
    assert "--max-fit-error" in capsys.readouterr().err and not (folder / "odd.json").exists()
    assert main(["--fit", str(folder / "odd.trace"), "--out", str(folder / "odd.json"), "--max-fit-error", "1e4"]) == 0


def test_every_simulation_tells_the_error_of_its_fit(call, folder, capsys):
    words = CostModel.read(folder / "cost.json").error.words()
    for more in ((), ("--sweep", "max_batch_size=2,4")):
        assert call(*more) == 0
        assert words in capsys.readouterr().out


def test_ctrl_c_leaves_no_file(call, folder, monkeypatch):
    def interrupted(*_, trace, **__):
        trace(IterationTrace(0, (), (), (), ()))
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "simulate", interrupted)
    before = sorted(path.name for path in folder.iterdir())
    assert call("--trace", "cut.trace", "--out", "cut.json") == 130
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("command", [["--cost", "cost.json", "--workload", "w.json"],
                                     ["--fit", "run.trace", "--out", "other.json", "--report", "json"]])
def test_a_reader_that_goes_changes_no_status(folder, command):
    run = subprocess.Popen([sys.executable, "-m", "batch_manager.tools.simulate", *command], cwd=folder,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    assert (run.wait(60), run.stderr.read()) == (0, b"")


def test_the_pool_of_the_fitted_run_keeps_its_tokens(call, folder, capsys):
    assert call("--out", "r.json", "--report", "none") == 0
    assert main(["--fit", "run.trace", "--result", "r.json", "--out", "with_result.json", "--report", "none"]) == 0
    for size in ("16", "64"):
        assert main(["--cost", "with_result.json", "--workload", "w.json", "--tokens-per-block", size, "--report",
                     "json"]) == 0
        assert json.loads(capsys.readouterr().out)["kv_tokens"] == ENGINE.num_blocks * 64


def test_requests_that_fail_are_named(call, capsys):
    assert call("--max-seq-len", "100", "--report", "none") == 1
    assert "max_seq_len - 1 = 99" in capsys.readouterr().err


def test_no_torch_is_imported(folder):
    code = ("import sys; from batch_manager.tools.__main__ import main; "
            "status = main(['simulate', '--cost', 'cost.json', '--workload', 'w.json']); "
            "sys.exit(status or 'torch' in sys.modules)")
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=subprocess.DEVNULL, timeout=300)
    assert ended.returncode == 0


@pytest.mark.parametrize("option, value", [("--scatter-seed", "x"), ("--replicas", "1.5")])
def test_what_is_no_whole_number_is_named(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--cost", "c", "--workload", "w", option, value])
    assert f"argument {option}: '{value}' is not a whole number" in capsys.readouterr().err
