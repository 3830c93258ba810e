"""What is prepared before the first quarter of an hour on a GPU."""

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.first_quarter import __main__ as program
from tests.first_quarter import prepare as preparing
from tests.first_quarter.steps import ROOT

COUNTED = """
import collections, torch
from tests.first_quarter import compile_for_gpu as compiler
launched = collections.Counter()
compiler.ahead.JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **more: launched.update([kernel.__name__])
compiler.build_launchers = lambda: sorted(launched)
compiler.main("llama-135m", "8")
compiler.main("correctness", "float16")
"""


def packed(path, files):
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content.encode()))


def test_what_was_prepared_is_unpacked_for_the_steps(tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    with zipfile.ZipFile(prepared / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "print('carried')")
    group = {"child_paths": {"kernel.cubin": "/where/it/was/made/A/kernel.cubin"}}
    packed(prepared / program.KERNELS, {"./A/kernel.cubin": "", "./A/__grp__kernel.json": json.dumps(group)})
    variables, told = program.environment(tmp_path / "scratch", prepared, is_dry=False)
    done = subprocess.run([sys.executable, "-c", "import carried"], env=variables, capture_output=True, text=True,
                          timeout=300)
    assert done.stdout == "carried\n" and not told
    kernel = Path(variables["TRITON_CACHE_DIR"]) / "A" / "kernel.cubin"
    assert kernel.exists()                       # triton looks for each file where its group says
    group = json.loads(kernel.with_name("__grp__kernel.json").read_text())
    assert group["child_paths"] == {"kernel.cubin": str(kernel)}


def test_what_cannot_be_unpacked_costs_only_itself(tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "broken.whl").write_text("no wheel")
    packed(prepared / program.KERNELS, {"./A/kernel.cubin": ""})
    variables, told = program.environment(tmp_path / "scratch", prepared, is_dry=False)
    assert "broken.whl cannot be unpacked: BadZipFile" in str(told)
    assert (Path(variables["TRITON_CACHE_DIR"]) / "A" / "kernel.cubin").exists()


def test_a_machine_without_the_python_of_the_gpu_machine_is_told_so(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(preparing, "PYTHON_VERSION", "9.9")
    monkeypatch.setattr(preparing, "download_wheels", lambda folder: True)
    original = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **more: ran.append(command) or (
        SimpleNamespace(returncode=0) if "--dry-run" in command else original(command, **more)))
    assert preparing.prepare(tmp_path / "prepared", tmp_path / "environment") == 1
    printed = capsys.readouterr().out
    assert "no Python 9.9 was found; expected python9.9 in the PATH" in printed
    assert "no kernels are compiled ahead, which takes Python 9.9" in printed
    assert ran[-1][0] == sys.executable and "--call 2 --prepared" in printed


def test_wheels_in_the_checkout_are_no_files_of_the_repository(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=300)
    (tmp_path / ".first").mkdir()
    (tmp_path / ".first" / "a.whl").touch()
    for _ in range(2):
        preparing.keep_from_git(Path(".first"), tmp_path)
    shown = subprocess.run(["git", "status", "--short"], cwd=tmp_path, capture_output=True, text=True, check=True,
                           timeout=300)
    assert shown.stdout == ""
    assert (tmp_path / ".git" / "info" / "exclude").read_text().count("/.first/\n") == 1


def test_stand_ins_let_a_library_be_loaded_without_what_it_was_linked_with(tmp_path):
    from tests.first_quarter.stand_ins import make_stand_ins

    def build(name, code, *options):
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "-x", "c", "-", "-x", "none",
                        *options],
                       cwd=folder, input=code, text=True, check=True, timeout=300)

    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "map").write_text("libcuversions.so.3 { cuWith; };")
    build("libcuversions.so.3", "int cuWith(void) { return 1; }", f"-Wl,--version-script={tmp_path}/map")
    build("libncclplain.so.2", "int ncclWithout(void) { return 2; }")
    build("libuser.so", "int cuWith(void); int ncclWithout(void); int user(void) { return cuWith() + ncclWithout(); }",
          "./libcuversions.so.3", "./libncclplain.so.2", "-Wl,-rpath,$ORIGIN")
    missing = ["libcuversions.so.3", "libncclplain.so.2"]
    for name in missing:
        (folder / name).unlink()
    assert make_stand_ins(tmp_path) == missing
    code = f"import ctypes; print(ctypes.CDLL('{folder}/libuser.so').user())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout == "200\n"
    assert make_stand_ins(tmp_path) == []


def test_kernels_of_an_engine_and_of_the_checks_are_compiled_instead_of_launched():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COUNTED], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    engine, checks = done.stdout.splitlines()
    for name in ("_decode_kernel", "_context_kernel", "_fused_linear_kernel", "_sample_digit_kernel"):
        assert name in engine and name in checks, (engine, checks)
    assert "_beam" in checks
