"""GCC's sanitizers find no data race and no access out of bounds in a step."""

import shutil
import subprocess
from pathlib import Path

import pytest

from batch_manager.triton_kernels.cpu.native.build import HERE

PROGRAM = Path(__file__).with_name("many_jobs.c")


@pytest.mark.parametrize(("sanitizer", "machine"), [("thread", "x86-64-v3"), ("address", "native")])
def test_many_jobs(sanitizer, machine, tmp_path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc")
    program = tmp_path / "many_jobs"
    made = subprocess.run([compiler, "-Og", "-g1", f"-march={machine}", f"-fsanitize={sanitizer}", "-Wno-psabi",
                           f"-I{HERE}", "-o", str(program), str(PROGRAM), "-lm", "-pthread"],
                          capture_output=True, text=True, timeout=300)
    if made.returncode:
        pytest.skip(f"no such sanitizer: {made.stderr.splitlines()[-1]}")
    result = subprocess.run([program], capture_output=True, text=True, timeout=200, env={"ASAN_OPTIONS": ""})
    assert (result.returncode, result.stdout) == (0, "0 wrong\n"), result.stderr
