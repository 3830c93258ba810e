"""`batch-manager workload KIND` writes a valid workload of each kind, and refuses wrong options."""

import json
import subprocess
import sys

import numpy as np
import pytest

from batch_manager.tools.datasets import read_arrivals
from batch_manager.tools.lengths import NormalLengths, UniformLengths
from batch_manager.tools.workload import KINDS, main, make_workload
from batch_manager.tools.workload_kinds import KINDS as COMMANDS

NORMAL = ["token-norm-dist", "--input-mean", "20", "--input-stdev", "4", "--output-mean", "6", "--output-stdev", "0"]
UNIFORM = ["token-unif-dist", "--input-min", "3", "--input-max", "5", "--output-min", "2", "--output-max", "2"]


@pytest.fixture
def write(tmp_path, capsys):
    def write(*arguments, status=0):
        out = tmp_path / "out"
        try:
            assert main([*map(str, arguments), "--out", str(out)]) == status
        except SystemExit as end:
            assert end.code == status
        printed = capsys.readouterr()
        if status:
            assert not out.exists() and printed.out == "" and printed.err.count("\n") == 1
            return printed.err
        made = json.loads(out.read_text())
        out.unlink()
        return made, printed

    return write


def test_every_kind_is_a_command():
    assert tuple(COMMANDS) == KINDS


def test_normal_lengths(write):
    made, printed = write(*NORMAL, "--num-requests", 400, "--vocab", 100, "--random-seed", 3)
    lengths = [len(one["prompt"]) for one in made["requests"]]
    assert len(lengths) == 400 and 19.5 < sum(lengths) / 400 < 21.5 and len(set(lengths)) > 10
    assert {one["max_tokens"] for one in made["requests"]} == {6}
    assert made == make_workload(count=400, seed=3, vocab_size=100, prompts=NormalLengths(20, 4),
                                 outputs=NormalLengths(6, 0))
    assert json.loads(printed.out) == {name: value for name, value in made.items() if name != "requests"}
    short, _ = write("token-norm-dist", "--input-mean", 1, "--input-stdev", 50, "--output-mean", 1,
                     "--output-stdev", 50)
    assert min(len(one["prompt"]) for one in short["requests"]) == 1
    assert min(one["max_tokens"] for one in short["requests"]) == 1


def test_uniform_lengths(write):
    made, _ = write(*UNIFORM, "--num-requests", 100)
    assert {len(one["prompt"]) for one in made["requests"]} == {3, 4, 5}
    assert {one["max_tokens"] for one in made["requests"]} == {2}
    assert UniformLengths(7, 7).draw(np.random.default_rng(0), 3).tolist() == [7, 7, 7]


def test_log_normal_is_what_is_written_without_a_kind(write):
    assert write("log-normal", "--random-seed", 2)[0] == write("--random-seed", 2)[0]
    made, _ = write("log-normal", "--input-min", 500, "--input-sigma", 0.1, "--shared-prefix", 64)
    assert len({tuple(one["prompt"][:64]) for one in made["requests"]}) == 1
    assert {len(one["prompt"]) for one in made["requests"]} == {500}


def test_delays(write):
    constant, _ = write(*UNIFORM, "--num-requests", 5, "--request-rate", 4, "--delays", "constant")
    assert [one["arrival_s"] for one in constant["requests"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    drawn, _ = write(*UNIFORM, "--num-requests", 5, "--request-rate", 4)
    assert drawn["requests"][1]["arrival_s"] != 0.25 and drawn["mode"] == "online"


def test_a_dataset_of_gpt_manager_benchmark(write, tmp_path):
    arguments = [*UNIFORM, "--num-requests", 3, "--request-rate", 4, "--delays", "constant"]
    workload, _ = write(*arguments)
    dataset, _ = write(*arguments, "--as", "dataset")
    assert dataset["metadata"] == {"workload_type": "token-unif-dist", "workload_name":
                                   "n:3__input_mean:4.333__output_mean:2.0__rate:4.0__seed:0"}
    assert dataset["samples"] == [
        {"input_ids": one["prompt"], "output_len": 2, "task_id": -1, "delay": delay}
        for one, delay in zip(workload["requests"], [0.25, 0.25, 0.0], strict=True)]
    (tmp_path / "dataset").write_text(json.dumps(dataset))
    again, _ = write("dataset", tmp_path / "dataset")
    assert again["requests"] == workload["requests"]
    assert again["vocab"] == 1 + max(max(one["prompt"]) for one in workload["requests"])
    assert "the vocabulary has 10 tokens" in write("dataset", tmp_path / "dataset", "--vocab", 10, status=2)
    assert "--output-tokens is 7; it has no effect on" in write("dataset", tmp_path / "dataset", "--output-tokens", 7,
                                                                status=2)


def test_texts(write, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "texts").write_text('{"prompt": "It is"}\n{"prompt": "a truth"}\n')
    model = "examples/models/austen-4m"
    made, _ = write("dataset", tmp_path / "texts", "--tokenizer", model, "--output-tokens", 7, "--request-rate", 1)
    assert [one["max_tokens"] for one in made["requests"]] == [7, 7] and made["vocab"] == 4096
    assert made["requests"][1]["arrival_s"] > 0
    assert write("dataset", tmp_path / "texts", status=2).endswith("pass a model's folder with --tokenizer\n")
    assert "pass --output-tokens" in write("dataset", tmp_path / "texts", "--tokenizer", model, status=2)
    assert "--tokenizer: there is no folder" in write("dataset", tmp_path / "texts", "--tokenizer", "none", status=2)
    drawn, _ = write(*UNIFORM, "--tokenizer", model)
    assert drawn["vocab"] == 4096


def test_a_trace(write):
    made, printed = write("trace", "sample:mooncake", "--num-requests", 20, "--max-input-tokens", 2000, "--time-scale",
                          0.5)
    arrivals = list(read_arrivals("sample:mooncake"))[:20]
    assert [one["arrival_s"] for one in made["requests"]] == [one.arrival_s / 2 for one in arrivals]
    assert [len(one["prompt"]) for one in made["requests"]] == [min(2000, one.input_tokens) for one in arrivals]
    assert made["source"]["format"] == "mooncake" and made["vocab"] == 49152
    cut = sum(one.input_tokens > 2000 for one in arrivals)
    assert printed.err == f"batch-manager workload: {cut} requests with a prompt truncated to the limit\n" and cut > 5


def test_a_slice_of_a_trace_as_a_trace(tmp_path, capsys):
    out = tmp_path / "slice"
    arguments = ["trace", "sample:mooncake", "--skip", "3", "--num-requests", "5", "--as", "mooncake"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == {"n": 5, "as": "mooncake"}
    whole = list(read_arrivals("sample:mooncake"))[3:8]
    assert [one.prefix_ids for one in read_arrivals(out)] == [one.prefix_ids for one in whole]


def test_the_standard_output(capsys):
    assert main([*UNIFORM, "--num-requests", "2", "--out", "-"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["requests"]) == 2 and json.loads(printed.err)["n"] == 2
    assert main(["sample-trace", "--num-requests", "2", "--out", "-"]) == 0
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("arguments, text", [
    (["norm"], "the kind is 'norm'; expected one of token-norm-dist"),
    ([*NORMAL, "--input-mean", "-1"], "--input-mean is -1.0; expected more than 0"),
    ([*NORMAL, "--input-mean", "nan"], "--input-mean is nan; expected more than 0"),
    ([*NORMAL, "--output-stdev", "-1"], "--output-stdev is -1.0; expected 0 to"),
    ([*UNIFORM, "--input-min", "0"], "--input-min is 0; expected at least 1"),
    ([*UNIFORM, "--input-max", "2"], "--input-max is 2; expected 3 (--input-min) to"),
    ([*UNIFORM, "--num-requests", "0"], "--num-requests: 0 is too small; expected at least 1"),
    ([*UNIFORM, "--num-requests", "99999999999"], "99999999999 is too large; expected at most 10000000"),
    ([*UNIFORM, "--request-rate", "1e-300"], "1e-300 is too low; expected at least 0.000001"),
    ([*UNIFORM, "--random-seed", "-1"], "--random-seed: -1 is too small; expected at least 0"),
    ([*UNIFORM, "--shared-prefix", "-1"], "--shared-prefix: -1 is too small; expected at least 0"),
    ([*UNIFORM, "--vocab", "3"], "--vocab is 3; expected 4 to"),
    (["log-normal", "--input-median", "0"], "--input-median is 0.0; expected more than 0"),
    (["log-normal", "--output-sigma", "inf"], "--output-sigma is inf; expected 0 to 10"),
    (["trace", "none"], "none: the file cannot be opened: No such file or directory; "),
    (["trace", "sample:azure", "--num-requests", "0"], "--num-requests: 0 is too small; expected at least 1"),
    (["trace", "sample:azure", "--skip", "1000"], "sample:azure: no request is left: the file has 1,000 requests"),
    (["trace", "sample:azure", "--format", "mooncake"], "sample:azure:1:1: the line is not JSON"),
    (["dataset", "sample:azure"],
     "the format is azure; `batch-manager workload dataset` reads other formats; use `batch-manager workload trace`"),
    (["sample-trace", "--burstiness", "0"], "--burstiness is 0.0; expected 0.05 to 20"),
    *(([kind, "--request-rate", value], f"--request-rate: {value} is not a rate")
      for kind in ("sample-trace", "log-normal") for value in ("nan", "-1", "inf")),
    (["sample-trace", "--input-median", "0"], "--input-median is 0.0; expected 1 to"),
    (["sample-trace", "--output-median", "0"], "--output-median is 0.0; expected 1 to"),
    (["sample-trace", "--request-rate", "0.000001", "--num-requests", "400000"],
     " s; expected at most 1e+10 s in this format; raise the rate, or take fewer requests"),
    (["sample-trace", "--as", "mooncake", "--request-rate", "0.000001"], " s; expected at most 1e+07 s in this format"),
    (["sample-trace", "--num-requests", "0"], "--num-requests: 0 is too small; expected at least 1"),
])
def test_what_is_refused_in_one_line_with_nothing_written(arguments, text, write):
    assert text in write(*arguments, status=2)


def test_a_folder_that_is_not_there_is_refused_before_the_work(tmp_path, capsys):
    for arguments in ([], UNIFORM):
        assert main([*arguments, "--out", str(tmp_path / "none" / "w.json")]) == 2
        assert "is in a folder that does not exist; " in capsys.readouterr().err


def test_a_reader_that_has_seen_enough():
    command = f"{sys.executable} -m batch_manager.tools workload sample-trace --num-requests 20000 --out - | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("TIMESTAMP")


def test_a_full_disk(capsys):
    assert main([*UNIFORM, "--out", "/dev/full"]) == 2
    assert capsys.readouterr().err == ("batch-manager workload: /dev/full: the file cannot be written: No space left "
                                       "on device; expected a writable path and enough space\n")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_trace_is_never_overwritten(is_link, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    assert main(["sample-trace", "--num-requests", "3", "--out", str(trace)]) == 0
    before, out = trace.read_text(), trace
    if is_link:
        out = tmp_path / "link.csv"
        out.symlink_to(trace)
    assert main(["trace", str(trace), "--out", str(out)]) == 2
    assert f"FILE and --out both name {out}; expected a file for each" in capsys.readouterr().err
    assert trace.read_text() == before


def test_a_file_that_opens_and_cannot_be_read_is_refused(write):
    assert "/proc/self/mem: the file cannot be read: Input/output error; expected" in write(
        "trace", "/proc/self/mem", status=2)


def test_a_value_out_of_range_is_told_its_range(write, tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n1e300,3,4\n")
    assert "arrival_s is 1e+300; expected a number, 0 to 10000000000; " in write("trace", tmp_path / "t.csv", status=2)
