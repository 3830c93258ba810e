"""The program `batch-manager` runs its commands, and each command imports only the modules that it needs."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from batch_manager._version import __version__
from batch_manager.tools import __main__ as dispatcher
from tests.harness import forked
from tests.tools.test_compare_sides import RESULT

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "triton", "transformers", "safetensors"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def imported_by(*arguments):
    """Run `batch-manager` with `arguments`. Return (exit status, names of the imported top-level modules)."""
    result = subprocess.run([sys.executable, "-X", "importtime", "-m", "batch_manager.tools", *arguments],
                            capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return result.returncode, {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


def test_help_names_every_command_and_imports_none(capsys):
    assert dispatcher.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in dispatcher.COMMANDS)
    status, imported = imported_by("--help")
    assert status == 0 and "numpy" not in imported and not HEAVY & imported


def test_every_command_is_a_tool(capsys):
    assert {"watch", "bench", "workload", "host-bench"} <= set(dispatcher.COMMANDS)
    for name, (module, text) in dispatcher.COMMANDS.items():
        assert find_spec(f"batch_manager.tools.{module}") and text
        with pytest.raises(SystemExit, match="0"):
            dispatcher.main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: batch-manager {name} "), name


def test_a_closed_or_full_standard_output_is_one_line_and_status_2(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"Iteration Counter": 1, "Monotonic Microseconds": 1}\n')
    result = tmp_path / "r.json"
    result.write_text(json.dumps(RESULT))
    with open("/dev/full", "w") as full:
        for command in ("--help", "workload --help", "workload --num-requests 2 --out -", "draw --demo",
                        f"compare {result} {result}", "draw --demo --svg -",
                        f"watch {tmp_path / 's.jsonl'} --count 1 --interval 0.1"):
            program = "batch-manager" if command == "--help" else f"batch-manager {command.split()[0]}"
            line = [sys.executable, "-m", "batch_manager.tools", *command.split()]
            runs = [(forked.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=REPOSITORY),
                     "No space left on device")]
            if command in ("--help", "draw --demo"):                # these two ways to print, closed
                runs.append((subprocess.run(["sh", "-c", f"{' '.join(line)} >&-"], stderr=subprocess.PIPE, text=True,
                                            timeout=60, cwd=REPOSITORY), "Bad file descriptor"))
            for run, why in runs:
                told = f"{program}: the standard output cannot be written: {why}; direct it elsewhere\n"
                assert (run.returncode, run.stderr) == (2, told), command


def test_watch_imports_little(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"Iteration Counter": 1, "Monotonic Microseconds": 1}\n')
    status, imported = imported_by("watch", str(tmp_path / "s.jsonl"), "--count", "1", "--interval", "0.1")
    assert status == 0 and "orjson" in imported
    assert not {*HEAVY, "numpy", "rich", "prometheus_client"} & imported
    status, imported = imported_by("watch", "--url", "127.0.0.1:9", "--timeout", "0", "--interval", "0.1")
    assert status == 1 and "prometheus_client" in imported
    assert not {*HEAVY, "numpy", "rich"} & imported


def test_a_command_gets_its_arguments_and_gives_its_status(tmp_path):
    out = tmp_path / "w.json"
    assert dispatcher.main(["workload", "--out", str(out), "--num-requests", "3"]) == 0
    assert len(json.loads(out.read_text())["requests"]) == 3
    assert dispatcher.main(["watch", str(tmp_path / "none"), "--timeout", "0", "--interval", "0.1"]) == 1


@pytest.mark.parametrize("arguments, told", [([], "no command was given"), (["banana"], "unknown command 'banana'"),
                                             (["--watch"], "unknown command '--watch'")])
def test_what_is_no_command_is_status_two(arguments, told, capsys):
    assert dispatcher.main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error and "host-bench" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [
    *dispatcher.COMMANDS, *(f"workload {kind}" for kind in ("token-norm-dist", "dataset", "sample-trace"))])
def test_an_unknown_option_is_refused_in_one_line(command, capsys):
    """The line names program, option and the way to the help, without the usage."""
    with pytest.raises(SystemExit) as ended:
        dispatcher.main([*command.split(), "--banana"])
    out, error = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert error.startswith(f"batch-manager {command}: ") and error.count("\n") == 1
    assert error.endswith(f"; batch-manager {command} --help describes the options\n") and "usage" not in error


def test_the_program_is_installed_under_its_name(capsys):
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"batch-manager": f"{dispatcher.__name__}:{dispatcher.main.__name__}"}
    assert dispatcher.main(["--version"]) == 0
    assert capsys.readouterr().out == f"batch-manager {__version__}\n"


def test_ctrl_c_in_any_command_is_status_130(monkeypatch):
    from batch_manager.tools import workload

    def interrupted(_):
        raise KeyboardInterrupt
    monkeypatch.setattr(workload, "main", interrupted)
    assert dispatcher.main(["workload"]) == 130
