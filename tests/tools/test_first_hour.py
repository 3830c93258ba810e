"""The program for the first hour on a GPU runs as far as it can without a GPU."""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.first_hour import __main__ as first_hour
from tests.first_hour.parts import CALL_MINUTES, CALLS, PARTS, REQUIRED_WHEELS, ROOT, Part, gpu_test_files

# The required packages that the image of the GPU machine contains.
IN_THE_IMAGE = {"torch", "triton", "numpy", "safetensors"}


def part(code, seconds=20, **options):
    return Part("a-part", "a part", seconds, ("-c", code), ("-c", code), **options)


def test_every_call_keeps_within_its_minutes_and_all_within_half_an_hour():
    names = [name for names in CALLS for name in names]
    assert sorted(names) == sorted(one.name for one in PARTS)
    seconds = {one.name: one.seconds for one in PARTS}
    for call in CALLS:
        assert sum(seconds[name] for name in call) <= CALL_MINUTES * 60 - 30
    assert CALL_MINUTES < 10 and sum(seconds.values()) < 30 * 60 - 180      # transfers, and the machine's start


def test_what_the_package_needs_is_there_or_carried():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for line in needed}
    assert names - IN_THE_IMAGE == set(REQUIRED_WHEELS)


def test_a_dry_run_does_what_can_be_done_here(tmp_path):
    # The report and the engine in bfloat16 have their own tests.
    done = subprocess.run([sys.executable, "-m", "tests.first_hour", "--out", str(tmp_path), "--dry-run", "--part",
                           "memcheck"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(line["part"], line["status"]) for line in summary] == [("memcheck", "ok")]
    assert set(json.loads((tmp_path / "memcheck.log").read_text().splitlines()[-1])) == {"0", "1", "2", "3"}
    assert "torch" in done.stdout and "== memcheck: ok" in done.stdout


def test_dry_commands_of_the_other_parts_name_what_is_there():
    for one in PARTS:
        for is_dry in (False, True):
            if one.program and not is_dry:
                continue
            for argument in one.command(ROOT / "out", is_dry=is_dry):
                path = argument.removeprefix("--ignore=")
                assert not path.startswith("tests/") or (ROOT / path).exists(), argument


def test_files_with_tests_for_a_gpu_are_found():
    assert "tests/runtime/test_native_backend.py" in gpu_test_files()


def test_a_part_that_fails_or_takes_too_long_is_named_and_ends_with_its_children(tmp_path):
    environment = {"PATH": "/usr/bin"}
    line = first_hour.run_part(part("print('so far'); raise SystemExit(3)"), tmp_path, environment, 20, is_dry=True)
    assert (line["status"], line["last"]) == ("failed with status 3", ["so far"])
    code = ("import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(child.pid, flush=True)\ntime.sleep(60)")
    line = first_hour.run_part(part(code), tmp_path, environment, 1.5, is_dry=True)
    assert line["status"] == "ended at its limit" and line["seconds"] < 10
    time.sleep(0.2)
    state = subprocess.run(["ps", "-o", "state=", "-p", line["last"][0]], capture_output=True, text=True).stdout
    assert state.strip() in ("", "Z")
    missing = part("pass", program=("no-such-program",))
    assert first_hour.run_part(missing, tmp_path, environment, 9, is_dry=False)["status"] == "not run"
    assert first_hour.run_part(missing, tmp_path, environment, 9, is_dry=True)["status"] == "ok"


def test_a_part_runs_with_its_own_variables(tmp_path):
    show = "import os; print(os.environ['OWN'], os.environ['GIVEN'], os.environ.get('DRY'))"
    one = part(show, environment=(("OWN", "1"),), dry_environment=(("DRY", "2"),))
    for is_dry, expected in ((False, "1 3 None"), (True, "1 3 2")):
        assert first_hour.run_part(one, tmp_path, {"GIVEN": "3"}, 9, is_dry=is_dry)["last"] == [expected]


def test_memcheck_sees_every_allocation_and_a_sequence_in_parts():
    pytest.importorskip("triton")
    from batch_manager.triton_kernels.decode_work_list import decode_work_list
    from batch_manager.triton_kernels.device_limits import DeviceLimits
    from batch_manager.triton_kernels.paged_attention_decode import decode_settings
    from tests.first_hour.tiny_run import CONFIG, NEW_TOKENS, REQUESTS, TOKENS_PER_BLOCK

    (memcheck,) = (one for one in PARTS if one.name == "memcheck")
    assert dict(memcheck.environment) == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limits = DeviceLimits(shared_bytes=227 * 1024, multiprocessors=132, operands_in_shared=True)      # of an H100
    resident = decode_settings(CONFIG["head_dim"], TOKENS_PER_BLOCK, 2, limits).resident_programs
    lengths = [length + NEW_TOKENS - 1 for length, _ in REQUESTS]
    _, part_starts = decode_work_list(lengths, TOKENS_PER_BLOCK, CONFIG["num_key_value_heads"], resident)
    assert TOKENS_PER_BLOCK == 16 and part_starts[-1] >= 3 and part_starts[1] == 0


def test_what_the_time_does_not_suffice_for_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "prerequisites", lambda wheels: {"PATH": "/usr/bin"})
    lines = first_hour.run([part("pass"), part("pass", seconds=100)], tmp_path, None, 0.4, is_dry=True)
    assert [line["status"] for line in lines] == ["ok", "not run"]
    assert json.loads((tmp_path / "summary.json").read_text()) == lines


def test_the_commit_is_handed_to_the_report_alone(tmp_path):
    show = "import sys; print(sys.argv[1:])"
    reports = Part("a-part", "", 9, ("-c", show, "batch_manager.tools.gpu_report"), ())
    line = first_hour.run_part(reports, tmp_path, {}, 9, is_dry=False, commit="abc")
    assert line["last"] == ["['batch_manager.tools.gpu_report', '--commit', 'abc']"]
    line = first_hour.run_part(part(show), tmp_path, {}, 9, is_dry=False, commit="abc")
    assert line["last"] == ["[]"]


def test_wheels_in_the_checkout_are_no_files_of_the_repository(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".wheels").mkdir()
    (tmp_path / ".wheels" / "a.whl").touch()
    for _ in range(2):
        first_hour.keep_from_git(Path(".wheels"), tmp_path)
    shown = subprocess.run(["git", "status", "--short"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == ""
    assert (tmp_path / ".git" / "info" / "exclude").read_text().count("/.wheels/\n") == 1


def test_the_kernels_are_linked_into_a_checkout_that_came_without_the_link(tmp_path, monkeypatch):
    (tmp_path / "batch_manager").mkdir()
    monkeypatch.setattr(first_hour, "IMPORTS", "print('imports')")
    first_hour.prerequisites(None, tmp_path / "batch_manager" / "triton_kernels")
    assert (tmp_path / "batch_manager" / "triton_kernels").readlink().as_posix() == "../triton_kernels"
    monkeypatch.setattr(first_hour, "IMPORTS", "import no_such_package")
    with pytest.raises(RuntimeError, match="cannot be imported"):
        first_hour.prerequisites(None)
