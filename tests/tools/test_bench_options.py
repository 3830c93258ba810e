"""`batch-manager bench` reads its options, including those of gptManagerBenchmark, and refuses wrong ones."""

import numpy as np
import pytest

from batch_manager.tools.bench.load import Load
from batch_manager.tools.bench.options import parse_options
from batch_manager.tools.bench.original_options import ALIASES, REFUSED
from batch_manager.tools.datasets import Selection, read_arrivals

NEEDED = ["--model", "none", "--workload", "w.json"]


@pytest.mark.parametrize("more", [["--out", "w.json"], ["--out", "none"], ["--out", "a", "--trace", "./a"],
                                  ["--output-csv", "b", "--stats-csv", "b"]])
def test_two_files_of_one_name_are_refused_before_the_work(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--model", "none", "--workload", "w.json", *more])
    assert "both name" in capsys.readouterr().err


def options(*more):
    return parse_options([*NEEDED, *more])


def refusal(capsys, *more):
    with pytest.raises(SystemExit) as end:
        options(*more)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_command_line_of_the_original_is_taken():
    given = parse_options([
        "--engine_dir", "/models/m", "--dataset", "d.json", "--type", "UIFB", "--scheduler_policy=max_utilization",
        "--max_num_sequences", "64", "--max_tokens_in_paged_kvcache", "4096", "--kv_cache_free_gpu_mem_fraction", "0.5",
        "--enable_trt_overlap=true", "--enable_chunked_context=false", "--enable_kv_cache_reuse", "--streaming=true",
        "--max_batch_size", "16", "--max_num_tokens", "1024", "--request_rate", "-1", "--eos_id", "2", "--pad_id", "0",
        "--max_num_samples", "5", "--exclude_input_in_output_seq=0", "--first_batch_delay", "20", "--warm_up", "0",
        "--static_emulated_batch_size", "4", "--static_emulated_timeout", "100", "--max_prompt_len", "9",
        "--log_level", "verbose", "--return_context_logits", "--max_attention_window", "128", "--random_seed", "1"])
    assert (str(given.model), str(given.workload), given.type) == ("/models/m", "d.json", "InflightBatching")
    assert (given.policy, given.max_num_sequences, given.max_batch_size) == ("max_utilization", 64, 16)
    assert (given.max_tokens_in_paged_kvcache, given.kv_cache_free_gpu_mem_fraction, given.kv_gib) == (4096, 0.5, None)
    assert given.enable_trt_overlap and given.block_reuse and given.streaming and given.return_context_logits
    assert not given.chunked_context and not given.exclude_input_in_output_seq
    assert (given.max_num_tokens, given.request_rate, given.eos_id, given.pad_id) == (1024, 0.0, 2, 0)
    assert (given.num_requests, given.max_input_tokens, given.random_seed, given.delays) == (5, 9, 1, "exponential")
    assert (given.static_emulated_batch_size, given.static_emulated_timeout, given.first_batch_delay) == (4, 100, 20)


@pytest.mark.parametrize("written, delays", [
    ([], "exponential"), (["--enable_exp_delays"], "exponential"), (["--enable_exp_delays=false"], "constant"),
    (["--no-enable-exp-delays"], "constant"), (["--delays", "constant"], "constant")])
def test_a_rate_is_a_poisson_process_unless_it_is_said_otherwise(written, delays):
    assert options("--request-rate", "2", *written).delays == delays


def test_one_rate_gives_the_same_times_in_every_command():
    times = [request["arrival_s"] for request in Load(request_rate=4.0, random_seed=3).arriving(
        [{"id": number, "arrival_s": 0.0} for number in range(50)])]
    records = read_arrivals("sample:azure", Selection(request_rate=4.0, seed=3, count=50))
    assert [record.arrival_s for record in records] == times
    assert np.diff(times).std() == pytest.approx(0.25, rel=0.4)


def test_what_is_not_given_is_as_it_was():
    given = options()
    assert (given.kv_gib, given.max_batch_size, given.max_num_tokens, given.num_threads) == (1.0, 32, 512, 2)
    assert given.streaming and given.chunked_context and not given.block_reuse and given.warm_up == 1
    static = options("--type", "V1")
    assert not static.streaming and not static.chunked_context
    assert not options("--beam-width", "2").streaming
    assert [options(*more).cpu_compile for more in ([], ["--cpu-compile"], ["--no-cpu-compile"])] == [None, True, False]


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_original_has_and_this_engine_does_not_is_refused_by_name(name, capsys):
    written = f"--{name.replace('-', '_')}"
    told = refusal(capsys, written, "1")
    assert written in told and REFUSED[name] in told


def test_names_of_others_are_names_of_ours(capsys):
    with pytest.raises(SystemExit):
        options("--help")
    told = capsys.readouterr().out
    assert all(f"--{alias} is --{name}" in " ".join(told.split()) for alias, name in ALIASES.items())
    assert all(name.replace("-", "_") in told for name in REFUSED)


@pytest.mark.parametrize("given, told", [
    (["--kv-gib", "0"], "above 0"),
    (["--kv-gib", "1", "--max-tokens-in-paged-kvcache", "9"], "both given"),
    *(([f"--request-rate={value}"], f"{value} is not a rate; expected requests/s, or 0 for all at once")
      for value in ("nan", "inf", "-1")),
    (["--find-saturation", "--request-rate", "0"], "both given"),
    (["--first-batch-delay", "86400001"], "expected 0 to 8.64e+07"), (["--busy-neighbours", "1025"], "at most 1024"),
    (["--request-rate", "x"], "not a number"),
    (["--request-rate", "1e-300"], "1e-300 is too low; expected at least 0.000001 requests/s, or 0 for all at once"),
    (["--sweep", "request_rate=1,1e-300"], "1e-300 is too low; expected at least 0.000001 requests/s"),
    (["--sweep", "threads=1,2"], "not a sweep"), (["--sweep", "concurrency="], "not a sweep"),
    (["--sweep", "concurrency=1,x"], "not a whole number"), (["--sweep", "concurrency=0"], "at least 1"),
    (["--sweep", "concurrency=2,2"], "a value twice"),
    (["--sweep", "concurrency=2", "--concurrency", "2"], "both given"),
    (["--sweep", "concurrency=2", "--find-saturation"], "both given"),
    (["--sweep", "concurrency=1,2", "--sweep", "request_rate=3"],
     "--sweep was given for concurrency and request_rate; expected one --sweep, which lists all values of one name"),
    (["--sweep", "concurrency=1", "--sweep=concurrency=2"], "given for concurrency and concurrency; expected one"),
    (["--sweep", "concurrency=2", "--stats-csv", "s.csv"], "both given"),
    (["--enable-exp-delays"], "without --request-rate"),
    (["--plot", "p", "--type", "V1"], "V1"), (["--plot", "/dev/null"], "not a folder"),
    (["--time-scale", "2", "--request-rate", "1"], "recorded times"),
    (["--streaming", "--beam-width", "2"], "does not stream"),
    (["--slo-share", "1.5"], "at most 1"), (["--type", "IF"], "invalid choice"), (["--max-b", "3"], "unrecognized"),
    (["--lora-modules", "plays"], "expected NAME=FOLDER"), (["--max-loras", "0"], "at least 1"),
    (["--synthetic-acceptance", "0.5,1.5"], "1.5 is out of range; expected 0 to 1"),
    (["--synthetic-acceptance", "0.5,"], "not a number"),
    (["--synthetic-acceptance", ",".join(65 * "1")], "at most 64"),
    (["--synthetic-acceptance", "1", "--speculative-config", '{"method": "ngram"}'], "both given"),
    (["--synthetic-acceptance", "1", "--type", "V1"], "verify no drafts"),
    (["--synthetic-acceptance", "1", "--find-saturation"], "both given"),
    (["--api", "executor"], "gptManager"), (["--out", "/no/such/folder/r.json"], "does not exist"),
    (["--out", "/"], "folder"),
    (["--warm-up", "-1"], "at least 0"), (["--static-emulated-timeout", "inf"], "expected 0 to 8.64e+07")])
def test_what_makes_no_sense_is_refused(given, told, capsys):
    assert told in refusal(capsys, *given)


def test_sweeps_are_read():
    assert options("--sweep", "request_rate=0.5,1,0").sweep == ("request_rate", [0.5, 1.0, 0.0])
    assert options("--sweep=concurrency=1,2,4").sweep == ("concurrency", [1, 2, 4])
    assert options("--max-concurrency", "3", "--num-prompts=7").concurrency == 3
