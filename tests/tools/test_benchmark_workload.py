import json

import numpy as np
import pytest

from batch_manager.tools import workload
from batch_manager.tools.workload import OUTPUTS, PROMPTS, Lengths, make_workload


def test_the_same_options_make_the_same_workload():
    assert make_workload(seed=7, rate=2.0) == make_workload(seed=7, rate=2.0)
    assert make_workload(seed=7) != make_workload(seed=8)


def test_the_default_workload_stays_what_it_was():
    # This workload is the basis for comparisons between versions.
    made = make_workload()
    assert (made["n"], made["prompt_tokens"], made["output_tokens"]) == (64, 11103, 5331)
    assert made["prompt_len"] == {"median": 135.0, "mean": 173.484375, "max": 512}
    assert sum(sum(request["prompt"]) for request in made["requests"]) == 272_590_030


def test_lengths_stay_in_their_range_around_their_median():
    for lengths in (PROMPTS, OUTPUTS):
        drawn = lengths.draw(np.random.default_rng(1), 4000)
        assert lengths.shortest <= drawn.min() and drawn.max() <= lengths.longest
        assert abs(np.median(drawn) - lengths.median) < 0.06 * lengths.median


def test_fixed_lengths():
    made = make_workload(count=5, prompts=Lengths(1, 1, 1, 1, fixed=12), outputs=Lengths(1, 1, 1, 1, fixed=3))
    assert all(len(request["prompt"]) == 12 and request["max_tokens"] == 3 for request in made["requests"])


@pytest.mark.parametrize("arguments, longest", [
    (["--input-min", "600", "--input-max", "600", "--shared-prefix", "601"], "600"),
    (["--shared-prefix", "513", "--num-requests", "4000"], "512"),
    (["token-unif-dist", "--input-min", "3", "--input-max", "5", "--output-min", "1", "--output-max", "1",
      "--shared-prefix", "6"], "5")])
def test_a_shared_prefix_that_is_longer_than_every_prompt_is_refused(arguments, longest, tmp_path, capsys):
    out = tmp_path / "w.json"
    prefix = arguments[arguments.index("--shared-prefix") + 1]
    assert workload.main([*arguments, "--out", str(out)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"batch-manager workload: --shared-prefix is {prefix}; the longest prompt has "
                                    f"{longest} tokens; lower --shared-prefix, or make the prompts longer\n")
    assert not out.exists()


def test_prompts_that_are_shorter_than_the_shared_prefix_are_counted(tmp_path, capsys):
    out = tmp_path / "w.json"
    assert workload.main(["--shared-prefix", "100", "--out", str(out)]) == 0
    prompts = [request["prompt"] for request in json.loads(out.read_text())["requests"]]
    shorter = sum(len(prompt) < 100 for prompt in prompts)
    assert 0 < shorter < 64 and capsys.readouterr().err == (
        f"batch-manager workload: {shorter} of 64 prompts are shorter than the shared prefix of 100 tokens; each such "
        "prompt is its beginning\n")
    assert workload.main(["--input-min", "100", "--input-max", "100", "--shared-prefix", "100", "--out", str(out)]) == 0
    assert not capsys.readouterr().err


def test_a_shared_prefix_changes_nothing_behind_it():
    plain, alike = (make_workload(count=30, shared_prefix=n)["requests"] for n in (0, 100))
    longest = max(alike, key=lambda request: len(request["prompt"]))["prompt"]
    for before, after in zip(plain, alike, strict=True):
        assert len(before["prompt"]) == len(after["prompt"]) and before["prompt"][100:] == after["prompt"][100:]
        assert after["prompt"][:100] == longest[:100][:len(after["prompt"])]


def test_a_rate_makes_arrivals_and_leaves_the_prompts_random():
    made = make_workload(count=400, rate=4.0)
    arrivals = [request["arrival_s"] for request in made["requests"]]
    assert made["mode"] == "online" and arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    assert 75 < arrivals[-1] < 130
    assert all(request["arrival_s"] == 0 for request in make_workload(count=3)["requests"])


def test_tokens_are_below_the_vocabulary_and_no_control_tokens():
    prompts = [token for request in make_workload(vocab_size=50)["requests"] for token in request["prompt"]]
    assert min(prompts) == 3 and max(prompts) == 49


def test_the_program_writes_what_the_function_makes(tmp_path, capsys):
    file = tmp_path / "w.json"
    assert workload.main(["--out", str(file), "--num-requests", "3", "--input-min", "5", "--input-max", "5",
                          "--output-min", "4", "--output-max", "4", "--vocab", "64"]) == 0
    written = json.loads(file.read_text())
    assert [len(request["prompt"]) for request in written["requests"]] == [5, 5, 5]
    summary = json.loads(capsys.readouterr().out)
    assert "requests" not in summary and summary["output_tokens"] == 12


def status_of(arguments):
    """Return the exit status of the program, whether the parser or the program itself refuses the arguments."""
    try:
        return workload.main(arguments)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("wrong, told", [
    (["--num-requests", "10000001"], "--num-requests: 10000001 is too large; expected at most 10000000"),
    (["--vocab", "99999999999999999999999999"], "; expected 4 to 2147483647"),
    (["--input-max", "99999999999999"], "--input-max is 99999999999999; expected 8 (--input-min) to 2147483647"),
    (["--output-max", "99999999999999"], "--output-max is 99999999999999; expected 4 (--output-min) to 2147483647")])
def test_numbers_that_are_too_large_are_refused(wrong, told, tmp_path, capsys):
    assert status_of(["--out", str(tmp_path / "w.json"), *wrong]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "w.json").exists()


@pytest.mark.parametrize("wrong, told", [
    (["--num-requests", "10000000", "--input-min", "2000000000", "--input-max", "2000000000"],
     "the prompts have 20000000000000000 tokens, about 745058060 GiB; expected at most half of the "),
    (["--request-rate", "0.000001", "--num-requests", "100000"],
     "the rate is 1e-06 requests/s, at which the workload lasts 9.9999e+10 s; expected at most 1e+10 s; raise"),
    (["--request-rate", "1e-300"], "1e-300 is too low; expected at least 0.000001 requests/s")])
def test_a_workload_that_no_machine_can_serve_is_refused(wrong, told, tmp_path, capsys):
    assert status_of(["--out", str(tmp_path / "w.json"), *wrong]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1 and not (tmp_path / "w.json").exists()


@pytest.mark.parametrize("wrong", [["--num-requests", "0"], ["--request-rate", "nan"], ["--vocab", "3"]])
def test_options_without_sense_are_refused(wrong, tmp_path):
    assert status_of(["--out", str(tmp_path / "w.json"), *wrong]) == 2
