"""examples/jsonl_batch.py runs as its docstring says, and continues its work after a kill or a signal."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import forked

pytest.importorskip("tokenizers", reason="NOT RUN: the extra [text] is not installed")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/austen-4m"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def command(folder, *options):
    return [sys.executable, ROOT / "examples/jsonl_batch.py", folder / "in.jsonl", folder / "out.jsonl", "--model",
            MODEL, "--in-flight", "4", "--threads", "1", "--dtype", "float32", *options]


def run(folder, *options):
    return forked.run(command(folder, *options), capture_output=True, text=True, timeout=120)


def lines(folder):
    path = folder / "out.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(
        (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


ROWS = [{"id": f"row-{number}", "prompt": f"Emma had {number} sisters and", "max_tokens": 40} for number in range(16)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write(folder, ROWS)
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "16 now; 0 are left" in done.stderr
    return {line["id"]: line for line in lines(folder)}


def test_every_line_is_answered_once(undisturbed):
    assert undisturbed.keys() == {row["id"] for row in ROWS}
    assert all(line["text"] and line["finish_reason"] in ("length", "end_id") for line in undisturbed.values())


def stopped_in_the_middle(process, folder):
    """Stop the process when it has written a line, by looking at it again and again while it is stopped."""
    deadline = time.monotonic() + 120
    while True:
        process.send_signal(signal.SIGSTOP)
        state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state.si_code == os.CLD_STOPPED and time.monotonic() < deadline
        if lines(folder):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_that_ends_early_is_gone_on_with(tmp_path, undisturbed, number):
    write(tmp_path, ROWS)
    with forked.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        stopped_in_the_middle(process, tmp_path)
        process.send_signal(number)                           # SIGTERM arrives when the process continues
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in ((-signal.SIGKILL,) if number == signal.SIGKILL else (0, 1)), errors
    before = lines(tmp_path)
    with (tmp_path / "out.jsonl").open("ab") as output:
        output.write(b'{"id": "row-15", "te')             # as a kill in the middle of a write leaves it
    assert run(tmp_path).returncode == 0
    after = lines(tmp_path)
    assert after[: len(before)] == before and len(after) == len(ROWS)
    assert {line["id"]: line for line in after} == undisturbed
    again = run(tmp_path)
    assert again.returncode == 0 and "16 lines were answered before, 0 now" in again.stderr


def test_bad_lines_cost_themselves_only(tmp_path):
    write(tmp_path, ["no json", {"id": [1], "prompt": "x"}, {"id": "a"}, {"id": "b", "prompt": "The", "max_tokens": 3},
                     {"id": "b", "prompt": "A second one"}, {"id": "c", "prompt": "The", "max_token": 3},
                     {"id": "d", "prompt": {"text": "The"}}, {"prompt": [-1], "max_tokens": 3}, "", "  ",
                     '{"prompt": "The", "seed": 1, "seed": 2}'])
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    found = {line["id"]: line for line in lines(tmp_path)}
    assert len(lines(tmp_path)) == 8 and found["b"]["num_tokens"] == 3
    assert {key for key, line in found.items() if line.get("error", {}).get("code") == "INVALID_REQUEST"} == {
        1, 2, "a", "c", "d", 8, 11}
    assert "line 5 has the id of an earlier line" in done.stderr
    assert found[1]["error"]["message"] == "line 1: it is not JSON; expected one JSON object per line"
    assert "'seed' occurs twice" in found[11]["error"]["message"]
    assert "did you mean max_tokens?" in found["c"]["error"]["message"]


def test_an_output_has_one_writer(tmp_path):
    write(tmp_path, ROWS)
    with (tmp_path / "out.jsonl").open("ab") as output:
        fcntl.flock(output, fcntl.LOCK_EX)
        done = run(tmp_path)
    assert done.returncode == 2 and "is being written by another run" in done.stderr


def test_lines_that_json_and_unicode_make_hard(tmp_path):
    deep = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"
    write(tmp_path, [deep, '{"prompt": "The", "id": "\\ud800", "max_tokens": 3}', '{"prompt": "The", "\\ud800": 1}',
                     {"prompt": "The", "logit_bias": [1], "max_tokens": 3},
                     {"prompt": "The", "logit_bias": {"5": 100}, "max_tokens": 3, "temperature": 0, "id": "biased"},
                     {"prompt": "The", "logit_bias": {"x": 100}, "max_tokens": 3}])
    done = run(tmp_path)
    assert done.returncode == 0 and "6 now (4 with an error); 0 are left" in done.stderr, done.stderr
    found = {line["id"]: line for line in lines(tmp_path)}
    assert found["\ud800"]["num_tokens"] == found["biased"]["num_tokens"] == 3
    assert {found[1]["error"]["message"][:7], *(found[number]["error"]["code"] for number in (3, 4, 6))} == {
        "line 1:", "INVALID_REQUEST"}
    again = run(tmp_path)
    assert again.returncode == 0 and "6 lines were answered before, 0 now" in again.stderr


@pytest.mark.parametrize("text", [b"my notes", b"my notes\n", b'{"id": "a", "prompt": "x"}\n', b"[1]\n{"])
def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path, text):
    write(tmp_path, ROWS[:1])
    (tmp_path / "out.jsonl").write_bytes(text)
    done = run(tmp_path)
    assert done.returncode == 2 and "was not written by this program; " in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == text


def test_the_input_is_no_output_and_what_is_missing_is_named(tmp_path):
    text = json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1])          # the last line has no newline
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "out.jsonl").symlink_to("in.jsonl")
    done = run(tmp_path)
    assert done.returncode == 2 and "is also the input; " in done.stderr and (tmp_path / "in.jsonl").read_text() == text
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "in.jsonl").unlink()
    done = run(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "in.jsonl" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_model_that_is_not_there_is_named_without_a_stack(tmp_path):
    write(tmp_path, ROWS)
    done = forked.run([*command(tmp_path)[:4], "--model", "openai-community/gpt2"], cwd=tmp_path, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("jsonl_batch: ") and done.stderr.count("\n") == 1
    assert "hf download" in done.stderr and lines(tmp_path) == []
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero"])
def test_an_output_that_is_a_device_is_refused(tmp_path, device):
    write(tmp_path, ROWS[:1])
    (tmp_path / "out.jsonl").symlink_to(device)
    done = subprocess.run(["bash", "-c", 'ulimit -v 6000000; exec "$@"', "bash", *command(tmp_path)],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "out.jsonl is not a regular file; expected a file or a new name; name another output" in done.stderr


@pytest.mark.parametrize("rows, message", [
    ([{"prompt": "The"}, {"id": 1, "prompt": "A second one"}],
     "line 2 has the id 1, which is the default id of line 1"),
    ([{"id": 3, "prompt": "The"}, {"id": "b", "prompt": "The"}, {"prompt": "A third one"}],
     "line 1 has the id 3, which is the default id of line 3"),
    (["no json", {"id": 1, "prompt": "The"}], "line 2 has the id 1, which is the default id of line 1"),
])
def test_an_id_that_is_the_number_of_a_line_without_id_is_refused(tmp_path, rows, message):
    write(tmp_path, rows)
    done = run(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr and "; expected different ids; give line" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_ids_that_only_look_like_line_numbers_of_others_are_kept(tmp_path):
    rows = [{"id": 1}, {"id": "3", "prompt": "The"}, {"prompt": "The"}, {"id": 2, "prompt": "The"},
            {"id": 2, "promt": "The"}]
    write(tmp_path, [{"max_tokens": 2, **row} for row in rows])
    (tmp_path / "file.jsonl").write_bytes((tmp_path / "in.jsonl").read_bytes())
    (tmp_path / "in.jsonl").unlink()
    os.mkfifo(tmp_path / "in.jsonl")                       # the input may be a pipe
    with subprocess.Popen(["cp", tmp_path / "file.jsonl", tmp_path / "in.jsonl"]):
        done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(str(line["id"]) for line in lines(tmp_path)) == ["1", "2", "3", "3"]
    assert "line 5 has the id of an earlier line" in done.stderr


@pytest.mark.parametrize("option, value, message", [
    ("--in-flight", "0", "argument --in-flight: 0 is too small; expected at least 1"),
    ("--threads", "-1", "argument --threads: -1 is too small; expected at least 1"),
    ("--dtype", "float7", "dtype is 'float7'; expected one of "),
])
def test_a_refused_option_is_named_and_makes_no_output(tmp_path, option, value, message):
    write(tmp_path, ROWS[:1])
    done = run(tmp_path, option, value)
    assert done.returncode == 2 and f": {message}" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "out.jsonl").touch()
    assert run(tmp_path, option, value).returncode == 2 and (tmp_path / "out.jsonl").exists()


def test_an_error_of_a_line_has_no_number_of_the_engine(tmp_path):
    write(tmp_path, [{"prompt": "The", "max_tokens": 2}, {"prompt": "The", "temperature": -1, "max_tokens": 2}])
    assert run(tmp_path).returncode == 0
    found = {line["id"]: line for line in lines(tmp_path)}
    assert found[2]["error"]["message"].startswith("temperature is -1")
