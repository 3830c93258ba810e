"""The program for the first quarter of an hour on a GPU loses nothing, ends in time, and names what is there."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import tomllib

import pytest

from tests.benchmarks.gpu_report.__main__ import parse_options
from tests.benchmarks.gpu_report.sections import CORRECTNESS, SECTIONS
from tests.first_quarter import __main__ as program
from tests.first_quarter import prepare, runner
from tests.first_quarter.facts import KERNELS, PROBLEMS
from tests.first_quarter.runner import ARCHIVE, LINES, LIST, NUM_RATES, Runner
from tests.first_quarter.steps import (
    CALL_SECONDS,
    COMMIT,
    MINUTES,
    OUT,
    PREPARED,
    PYTHON,
    RATES,
    ROOT,
    STEPS,
    Step,
    gpu_test_files,
)
from tests.harness import forked
from tests.harness.waiting import has_ended, until

# The required packages that the image of the GPU machine contains.
IN_THE_IMAGE = {"torch", "triton", "numpy", "safetensors"}
# Each step writes a file of its own; then one of them kills the program.
STAND_INS = """
import dataclasses, sys, time
from pathlib import Path
from tests.first_quarter.runner import Runner
from tests.first_quarter.steps import OUT, STEPS
call, killing, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
script = 'echo found > "$1/found"; test $2 = $3 && kill -9 $PPID; exit 0'
steps = [dataclasses.replace(one, command=("sh", "-c", script, "sh", OUT, one.name, killing))
         for one in STEPS if one.call == call]
folders = [folder / name for name in ("out", "work", "cache")]
Runner(call, *folders, {"PATH": "/bin:/usr/bin"}, {}, time.monotonic(), 600).run(steps)
"""

# The program with one step, which runs a shell script. A signal comes again while the archive is written.
PROGRAM = """
import os, signal, sys, tarfile
from tests.first_quarter import __main__ as program
opened = tarfile.open
tarfile.open = lambda *given, **more: os.kill(os.getpid(), signal.SIGINT) or opened(*given, **more)
from tests.first_quarter.steps import Step
command = ("sh", "-c", sys.argv[1])
program.STEPS = [Step(1, "a-step", "", 60, 1, command, command)]
sys.exit(program.main(sys.argv[2:]))
"""


def step(script, name="a-step", limit=20, **options):
    """Return a step that runs a shell script, whose first argument is the folder of the step."""
    command = ("sh", "-c", script, "sh", OUT)
    return Step(1, name, "a step", limit, 1, command, command, **options)


def run(tmp_path, *steps, seconds=60.0, is_dry=False, values=None):
    """Run the steps, and return (whether all succeeded, the entries of the list, name -> content of the archive)."""
    call = Runner(1, tmp_path / "out", tmp_path / "work", tmp_path / "cache", {"PATH": os.environ["PATH"]},
                  values or {}, time.monotonic(), seconds, is_dry=is_dry)
    return call.run(steps), *came_back(tmp_path / "out")


def came_back(out, call=1):
    """Return (the entries of the list, name -> content of the archive) of the only call in the folder."""
    archive_path, list_path = out / ARCHIVE.format(call), out / LIST.format(call)
    assert {path.name for path in out.iterdir()} <= {archive_path.name, list_path.name}
    files = {}
    if archive_path.exists():
        with tarfile.open(archive_path) as archive:
            files = {one.name: archive.extractfile(one).read().decode() for one in archive if one.isfile()}
    return list_path.read_text(), files


@pytest.mark.parametrize("killing", STEPS, ids=lambda one: one.name)
def test_a_call_that_is_killed_in_a_step_leaves_every_earlier_result(killing, tmp_path):
    names = [one.name for one in STEPS if one.call == killing.call]
    forked.run([sys.executable, "-c", STAND_INS, str(killing.call), killing.name, str(tmp_path)], cwd=ROOT,
               timeout=300)
    entries, files = came_back(tmp_path / "out", killing.call)
    earlier = names[: names.index(killing.name)]
    assert sorted(files) == sorted(f"results/{name}{end}" for name in earlier for end in ("/found", ".log"))
    lines = entries.splitlines()
    assert [line.split(":")[0] for line in lines] == [*earlier, killing.name]
    assert all(": ok, " in line for line in lines[:-1]) and ": running since " in lines[-1]


@pytest.mark.parametrize("call", CALL_SECONDS)
def test_a_step_that_is_killed_costs_only_itself(call, tmp_path):
    steps = [dataclasses.replace(step("echo found > $1/found; kill -9 $$"), name=one.name)
             for one in STEPS if one.call == call]
    succeeded, entries, files = run(tmp_path, *steps)
    assert not succeeded and entries.count("FAILED with SIGKILL") == len(steps)
    assert sum(name.endswith("/found") for name in files) == len(steps)


def test_the_limits_of_a_call_fit_into_its_time():
    for call, seconds in CALL_SECONDS.items():
        assert sum(one.limit for one in STEPS if one.call == call) <= seconds
    assert all(one.expected <= one.limit for one in STEPS)
    assert len({one.name for one in STEPS}) == len(STEPS)
    assert CALL_SECONDS == {1: 500, 2: 240}


def test_a_step_that_fails_says_so_with_the_end_of_its_log(tmp_path):
    succeeded, entries, files = run(tmp_path, step("echo so far; exit 3", "bad"), step("echo fine", "good"))
    assert not succeeded
    assert re.match(r"bad: FAILED with status 3, \d+ s of 20 s, .*\n    so far\ngood: ok, ", entries)
    assert files["results/good.log"] == "fine\n"
    succeeded, entries, _ = run(tmp_path, dataclasses.replace(step(""), command=("no-such-program",)))
    assert not succeeded and "not run, no-such-program cannot be started" in entries


def test_a_step_ends_at_its_limit_with_its_children_after_it_was_interrupted(tmp_path, monkeypatch):
    status = runner._status

    def after_its_start(process, seconds):
        until(lambda: (tmp_path / "work" / "a-step.log").read_text().endswith("\n"))
        return status(process, 0)

    monkeypatch.setattr(runner, "_status", after_its_start)
    monkeypatch.setattr(runner, "ENDING_SECONDS", 60)
    succeeded, entries, files = run(tmp_path, step("trap 'echo interrupted; exit' INT; sleep 600 & echo $!; wait"))
    assert not succeeded and "FAILED: ended at its limit" in entries
    child, *after = files["results/a-step.log"].split()
    assert after == ["interrupted"]
    until(lambda: has_ended(child))


def test_time_that_steps_leave_is_for_later_ones_and_the_call_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ENDING_SECONDS", 0.5)
    succeeded, _, _ = run(tmp_path, step("true", limit=30), step("sleep 1.2", "longer-than-its-limit", limit=1))
    assert succeeded
    began = time.monotonic()
    long = dataclasses.replace(step("sleep 600", limit=500), expected=0)
    succeeded, entries, _ = run(tmp_path, long, step("true", "late"), seconds=0.6)
    assert not succeeded and "a-step: FAILED: ended at its limit" in entries
    assert "late: not run, 0 s were left; expected 1 s" in entries and time.monotonic() - began < 300


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_call_that_is_ended_keeps_the_log_of_its_step_and_ends_it(number, status, tmp_path):
    """A second signal does not cost the results."""
    out, pid = tmp_path / "out", tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, f"echo begun; echo $$ > {pid}; exec sleep 600", "--call",
                                "1", "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: process.poll() is not None or pid.exists() and pid.read_text().endswith("\n"))
    assert process.poll() is None, process.stderr.read()
    process.send_signal(number)
    assert "Traceback" not in process.communicate(timeout=60)[1] and process.returncode == status
    until(lambda: has_ended(pid.read_text().strip()))
    entries, files = came_back(out)
    if status > 0:
        assert files == {"results/a-step.log": "begun\n"} and "interrupted at" in entries


def test_results_that_cannot_be_written_stop_no_step_and_a_lost_folder_is_made_again(tmp_path, capsys):
    out = tmp_path / "out"
    succeeded, entries, files = run(tmp_path, step(f"rm -r {out}; touch {out}", "first"), step(f"rm {out}", "second"),
                                    step(f"rm -r {out}", "third"))
    assert succeeded and entries.count(": ok, ") == 3 and len(files) == 3
    assert "the results could not be written: " in capsys.readouterr().out


def test_a_step_whose_files_are_lost_costs_only_itself(tmp_path):
    succeeded, entries, files = run(tmp_path, step(f"rm -r {tmp_path}/work", "first"),
                                    step("echo fine", "second"))
    assert not succeeded and entries.startswith("first: FAILED: ") and files == {"results/second.log": "fine\n"}


def test_two_calls_share_a_folder_and_a_call_is_not_repeated_in_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "STEPS", [dataclasses.replace(step("true"), call=call) for call in CALL_SECONDS])
    for call in CALL_SECONDS:
        assert program.main(["--call", str(call), "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in before} == {"results-1.tar.xz", "steps-1.txt", "results-2.tar.xz", "steps-2.txt"}
    for given in (["--call", "2"], ["--dry-run"]):
        assert "earlier call" in refused(capsys, *given, "--out", str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def refused(capsys, *given):
    """Return the one line on stderr of a refused command line."""
    with pytest.raises(SystemExit) as end:
        program.main(list(given))
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    return printed.err


LONG = "a" * 300                         # longer than a name of a file may be


@pytest.mark.parametrize("given, option", [
    *((f"--call 1 --out {place}", "--out") for place in ("FILE", "FILE/x", "/proc/x", "''", "/dev/null", LONG)),
    *((f"--prepare {place}", "--prepare") for place in ("FILE", "FILE/x", "/proc/x", "''", LONG, ".", "FOLDER/..")),
    *((f"--prepare FOLDER/new --environment {place}", "--environment")
      for place in ("FILE", "FILE/x", "/proc/x", "''", LONG, "FOLDER", "FOLDER/full", "FOLDER/venv", "FOLDER/new")),
    *((f"--call 1 --out FOLDER/new --prepared {place}", "--prepared")
      for place in ("FILE", "FOLDER", LONG, "none", "''")),
    *((f"--call 1 --out FOLDER/new --seconds {number}", "--seconds") for number in ("0", "-5", "nan", "inf", "x")),
    ("--call 1", "--out"), ("--call 1 --out FOLDER/new --commit ''", "--commit"),
    ("--call 1 --out FOLDER/new --environment e", "--environment"), ("--dry-run --seconds 5", "--seconds"),
    ("--dry-run --environment e", "--environment"), ("--dry-run --prepared none", "--prepared"),
    *((f"--prepare FOLDER/new {option} 5", option) for option in ("--out", "--prepared", "--seconds", "--commit"))])
def test_what_cannot_be_used_is_refused_by_name_and_nothing_is_touched(given, option, tmp_path, monkeypatch, capsys):
    file, folder = tmp_path / "a file", tmp_path / "a folder"
    for path in (file, folder / "full" / "kept", folder / "venv" / "pyvenv.cfg"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(program, "STEPS", [])
    if given == "--prepare .":
        monkeypatch.chdir(ROOT)
    elif given == "--prepare FOLDER/..":
        monkeypatch.setattr(prepare, "ROOT", folder)
    arguments = [one.replace("FILE", str(file)).replace("FOLDER", str(folder)) for one in shlex.split(given)]
    error = refused(capsys, *arguments)
    assert option in error and re.search("expected|leave it out|missing|not a number", error)
    assert sorted(path for path in tmp_path.rglob("*") if path != folder / "new") == before


def test_an_environment_that_was_made_here_may_be_made_again(tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "pyvenv.cfg").write_text(f"prompt = '{prepare.PROMPT}'")
    (tmp_path / "new").mkdir()
    for name in ("half", "new"):
        prepare.check_folders(tmp_path / "folder", tmp_path / name)


def test_what_cannot_be_unpacked_is_in_the_list_and_in_the_facts(tmp_path, monkeypatch, capsys):
    show = ("sh", "-c", f"echo ${PROBLEMS}")
    monkeypatch.setattr(program, "STEPS", [Step(1, "facts", "", 9, 1, show, show)])
    for name in (KERNELS, "orjson.whl"):
        (tmp_path / name).write_text("damaged")
    program.main(["--call", "1", "--out", str(tmp_path / "out"), "--prepared", str(tmp_path)])
    entries, files = came_back(tmp_path / "out")
    for text in (entries, files["results/facts.log"]):
        assert all(f"{name} cannot be unpacked: " in text for name in (KERNELS, "orjson.whl"))


def test_the_program_needs_no_package_that_the_gpu_machine_lacks():
    code = "import sys; sys.modules.update(orjson=None, torch=None, pytest=None); import tests.first_quarter.__main__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_rates_of_an_earlier_step_are_handed_on_when_all_are_there(tmp_path):
    denominators = pytest.importorskip("tests.benchmarks.gpu_report.denominators")
    assert len(denominators.RATES) == NUM_RATES
    line = json.dumps({"goal": "denominator", "status": "measured"})
    show = ("sh", "-c", 'echo "$@"', "sh", RATES, COMMIT)
    writes = f"printf '%s\\n' '{line}' >> $1/{LINES}; printf '{{' >> $1/{LINES}"
    half = ";".join([f"printf '%s\\n' '{line}' >> $1/{LINES}"] * NUM_RATES + [f"printf '{{' >> $1/{LINES}"])
    steps = [step(writes, "part"), step(half, "half"), Step(1, "before", "", 9, 1, show, show),
             step(";".join(["printf '\\n' >> $1/" + LINES, *[f"printf '%s\\n' '{line}' >> $1/{LINES}"] * NUM_RATES]),
                  "whole"), Step(1, "after", "", 9, 1, show, show)]
    _, _, files = run(tmp_path, *steps, values={COMMIT: ["--commit", "abc"]})
    assert files["results/before.log"] == "--commit abc\n"
    assert files["results/after.log"] == f"--rates {tmp_path}/work/whole/{LINES} --commit abc\n"


def test_variables_of_a_step_and_its_dry_command(tmp_path):
    given = step("echo -$OWN-", environment=(("OWN", "1"),))
    assert run(tmp_path, given)[2]["results/a-step.log"] == "-1-\n"
    assert run(tmp_path, given, is_dry=True)[2]["results/a-step.log"] == "--\n"


def test_commands_name_what_is_there():
    known = {PYTHON, OUT, COMMIT, RATES, PREPARED, MINUTES}
    for one in STEPS:
        for command in (one.command, one.dry):
            assert command[0] in (PYTHON, "env", "compute-sanitizer")
            for argument in command:
                assert not argument.startswith("{") or argument in known
                path = argument.removeprefix("--ignore=")
                assert not path.startswith("tests/") or (ROOT / path).exists(), argument
    assert "tests/runtime/test_native_backend.py" in gpu_test_files()


def test_reports_run_sections_that_there_are_within_their_limits():
    sections = {one.name: one for one in SECTIONS}
    for one in STEPS:
        if "--section" in one.command:
            names = one.command[one.command.index("--section") + 1 :]
            # The budget of the section `correctness` includes the compilation of its kernels, which are prepared.
            assert sum(sections[name].seconds for name in names if name != CORRECTNESS) <= one.limit
            assert one.dry[-len(names) :] == names
            for command in (one.command, one.dry):
                given = command[command.index("tests.benchmarks.gpu_report") + 1 :]
                least = ["0.02" if argument == MINUTES else argument for argument in given
                         if argument not in (RATES, COMMIT)]
                assert set(parse_options(least).section) == set(names)


def test_what_the_package_needs_is_there_or_carried():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for line in needed}
    assert names - IN_THE_IMAGE == {"orjson"}


def test_a_dry_run_of_a_step_runs_it_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "STEPS", [one for one in STEPS if one.name in ("facts", "memcheck")])
    assert program.main(["--dry-run", "--out", str(tmp_path)]) == 0
    with tarfile.open(tmp_path / ARCHIVE.format(2)) as archive:
        tokens = json.loads(archive.extractfile("results/memcheck.log").read().splitlines()[-1])
    assert set(tokens) == {"0", "1", "2", "3"}
    assert "facts: ok, " in (tmp_path / LIST.format(1)).read_text()


def test_memcheck_sees_every_allocation_and_a_sequence_in_parts():
    pytest.importorskip("triton")
    from batch_manager.triton_kernels.decode_work_list import decode_work_list
    from batch_manager.triton_kernels.device_limits import DeviceLimits
    from batch_manager.triton_kernels.paged_attention_decode import decode_settings
    from tests.first_quarter.tiny_run import CONFIG, NEW_TOKENS, REQUESTS, TOKENS_PER_BLOCK

    (memcheck,) = (one for one in STEPS if one.name == "memcheck")
    assert dict(memcheck.environment) == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limits = DeviceLimits(shared_bytes=227 * 1024, multiprocessors=132, operands_in_shared=True)      # of an H100
    resident = decode_settings(CONFIG["head_dim"], TOKENS_PER_BLOCK, 2, limits).resident_programs
    lengths = [length + NEW_TOKENS - 1 for length, _ in REQUESTS]
    _, part_starts = decode_work_list(lengths, TOKENS_PER_BLOCK, CONFIG["num_key_value_heads"], resident)
    assert TOKENS_PER_BLOCK == 16 and part_starts[-1] >= 3 and part_starts[1] == 0
