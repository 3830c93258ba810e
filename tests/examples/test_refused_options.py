"""Examples refuse options that cannot be used in one line, with status 2 and without a stack."""

import os
import sys
from pathlib import Path

import pytest

from tests.harness import forked

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def run(program, *options):
    return forked.run([sys.executable, EXAMPLES / program, *options], capture_output=True, text=True, timeout=60,
                     env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


def check_refusal(ended, *parts):
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1, ended.stderr
    assert all(part in ended.stderr for part in parts), ended.stderr


@pytest.mark.parametrize("option, value, message", [
    ("--redis", "foo", "--redis is not an address of Redis; expected redis://HOST:PORT, "),
    ("--redis", "redis://localhost:99999", "--redis is not an address of Redis; expected redis://HOST:PORT, "),
    ("--lease", "0", "--lease is 0.0; expected 1 to 86,400 seconds; leave it out for 10"),
    ("--lease", "nan", "--lease is nan; expected 1 to 86,400 seconds"),
    ("--lease", "inf", "--lease is inf; expected 1 to 86,400 seconds"),
    ("--drain", "-1", "--drain is -1.0; expected at least 0 seconds"),
    ("--in-flight", "0", "--in-flight is 0; expected at least 1"),
    ("--threads", "-1", "--threads is -1; expected at least 1; leave it out for the default"),
])
def test_an_option_of_the_redis_worker(option, value, message):
    pytest.importorskip("redis")
    check_refusal(run("redis_worker.py", "--model", EXAMPLES / "models" / "austen-4m", "--redis", "redis://localhost",
                      "--consumer", "a", option, value), message)


def test_the_model_of_the_redis_worker():
    pytest.importorskip("redis")
    pytest.importorskip("torch")
    ended = run("redis_worker.py", "--model", "nowhere", "--redis", "redis://localhost", "--consumer", "a")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("redis_worker: the model folder 'nowhere' cannot be opened")


@pytest.mark.parametrize("address", ["redi://:secret@localhost", "redis://me:secret"])
def test_the_password_of_redis_is_not_printed(address):
    pytest.importorskip("redis")
    ended = run("redis_worker.py", "--model", "m", "--consumer", "a", "--redis", address)
    check_refusal(ended, "--redis is not an address of Redis")
    assert "secret" not in ended.stderr


def test_the_folder_of_the_triton_repository():
    ended = run("triton_server/make_repository.py", "/dev/null/x", "--model", EXAMPLES / "models" / "austen-4m")
    check_refusal(ended, "/dev/null/x/gpt cannot be written (Not a directory)", "; name another")


def test_the_model_of_constrained_output(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("llguidance")
    shown = run("constrained_output.py", "--help")
    assert shown.returncode == 0 and "Constrained output: JSON from a schema" in shown.stdout
    check_refusal(run("constrained_output.py", tmp_path),
                  f"there is no tokenizer.json in {tmp_path}; expected ")
    tokenizer = (EXAMPLES / "models" / "austen-4m" / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    check_refusal(run("constrained_output.py", tmp_path), "config.json")
