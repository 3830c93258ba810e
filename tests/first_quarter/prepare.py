"""Prepares the first quarter of an hour on a GPU: wheels, kernels compiled ahead, and a dry run of both calls."""

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.harness.command_line import OptionError, make_folder

from .__main__ import TRITON_VARIABLES, files_to_unpack
from .facts import KERNELS, KEY_FILE
from .runner import ARCHIVE, LIST
from .stand_ins import make_stand_ins
from .steps import CALL_SECONDS, ROOT

# The packages of the GPU machine, as far as the package and its tests use them. torch comes without its dependencies,
# which are gigabytes of CUDA's libraries.
PYTHON_VERSION = "3.12"
TORCH = ("torch==2.11.0", "nvidia-cuda-runtime==13.0.96")
PACKAGES = ("triton==3.6.0", "numpy==2.5.2", "transformers==5.17.0", "safetensors==0.8.0", "orjson", "tokenizers",
            "pytest", "pytest-xdist", "hypothesis", "psutil", "filelock", "typing-extensions", "setuptools<82", "sympy",
            "networkx", "jinja2", "fsspec")
COMPLETE, PROMPT = "packages.txt", "first_quarter"         # file and prompt of an environment that is made here
CARRIED = ("orjson",)                    # needed by the package, and missing on the GPU machine
# Wheels for the machine; pip matches these numbers exactly.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux1_x86_64")
# Arguments of compile_for_gpu: the models of the steps with their largest batch, and the checks by value.
COMPILED = (("examples/models/austen-4m", "8", "16"), ("qwen3-0.6b", "256"), ("llama-135m", "256"), ("llama-8b", "256"),
            ("llama-1b", "64"), *(("correctness", dtype) for dtype in ("bfloat16", "float16", "float32")))


def prepare(folder: Path, environment: Path | None) -> int:
    """Fill the folder, dry-run both calls, and print the commands of the calls. Return 0 if all succeeded, or 1.

    Raises OptionError if one of the folders cannot be used.
    """
    environment = environment or default_environment()
    make_folder("--prepare", folder)
    make_folder("--environment", environment)
    check_folders(folder.resolve(), environment.resolve())
    if folder.resolve().is_relative_to(ROOT) and (ROOT / ".git").exists():
        keep_from_git(folder.resolve().relative_to(ROOT), ROOT)
    done = [_timed("wheels", lambda: download_wheels(folder))]
    python = _timed("environment", lambda: make_environment(environment))
    if python is None:
        print(f"no kernels are compiled ahead, which takes Python {PYTHON_VERSION} with {PACKAGES[0]}: the GPU machine "
              f"compiles them. The dry run takes {sys.executable}", flush=True)
    else:
        done.append(_timed("kernels", lambda: compile_kernels(Path(python), folder)))
    results = folder / "dry-run"
    for name in (pattern.format(call) for pattern in (ARCHIVE, LIST) for call in CALL_SECONDS):
        with contextlib.suppress(OSError):
            (results / name).unlink()                      # of an earlier --prepare
    prepared = ["--prepared", str(folder)] if files_to_unpack(folder) else []
    dry = [str(python or sys.executable), "-m", "tests.first_quarter", "--dry-run", *prepared, "--out", str(results)]
    done.append(_timed("dry run", lambda: subprocess.run(dry, cwd=ROOT, check=True).returncode == 0))
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(f"{folder} has {size / 2**20:.1f} MiB to carry")
    for number, seconds in CALL_SECONDS.items():
        print(f"call {number} (carry {folder}; ends after {seconds} s): python3 -m tests.first_quarter --call {number} "
              f"--prepared {folder} --out $OUT --commit $(git rev-parse HEAD)")
    return 0 if python is not None and all(done) else 1


def check_folders(folder: Path, environment: Path) -> None:
    """Raise OptionError if the environment is a folder of something else, because making it deletes what is there, or
    if the folder to carry has the checkout.
    """
    if ROOT.is_relative_to(folder):
        raise OptionError(f"--prepare is {folder}, which has the checkout; expected a folder of its own, such as "
                          ".first")
    if folder.is_relative_to(environment):
        raise OptionError(f"--environment is {environment}, which has the folder of --prepare; expected another "
                          "folder; name one")
    configuration = environment / "pyvenv.cfg"
    is_ours = (environment / COMPLETE).exists() or (
        configuration.exists() and PROMPT in configuration.read_text(errors="replace"))
    if any(environment.iterdir()) and not is_ours:
        raise OptionError(f"--environment is {environment}, which is not empty and no environment of --prepare, and "
                          "would be deleted; expected a new folder, or one that --prepare made; name another one")


def default_environment() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if cache.startswith("/") else Path.home() / ".cache") / "batch_manager" / "first_quarter"


def _timed(what: str, action: Callable[[], object]) -> object:
    """Return what the action returns, or None if it failed, and print its time and what went wrong."""
    began, problem, result = time.monotonic(), "", None
    try:
        result = action()
    except subprocess.CalledProcessError as error:
        problem = f": FAILED: {error}: {(error.stderr or '').strip()[-800:]}"
    except (OSError, RuntimeError) as error:
        problem = f": FAILED: {error}"
    print(f"{what}: {time.monotonic() - began:.0f} s{problem}", flush=True)
    return result


def download_wheels(folder: Path) -> bool:
    platforms = [f"--platform={name}" for name in PLATFORMS]
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version",
         PYTHON_VERSION, "--implementation", "cp", *platforms, "-d", folder, *CARRIED)
    return True


def find_python() -> Path:
    """Return a Python of the version of the GPU machine. Raises RuntimeError if there is none."""
    names = [shutil.which(f"python{PYTHON_VERSION}"), sys.executable, shutil.which("python3")]
    names += sorted(Path.home().glob(f".pyenv/versions/{PYTHON_VERSION}.*/bin/python"))
    for name in filter(None, names):
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        found = subprocess.run([str(name), "-c", code], capture_output=True, text=True, check=False)
        if found.stdout.strip() == PYTHON_VERSION:
            return Path(name)
    raise RuntimeError(f"no Python {PYTHON_VERSION} was found; expected python{PYTHON_VERSION} in the PATH, or one of "
                       "pyenv; install it, for example with `uv python install` or `pyenv install`")


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with the packages of the GPU machine, unless it is there. Return its Python."""
    python, complete = folder / "bin" / "python", folder / COMPLETE
    packages = "\n".join((*TORCH, *PACKAGES))
    if not complete.exists() or complete.read_text() != packages:
        _run(find_python(), "-m", "venv", "--clear", "--prompt", PROMPT, folder)
        _run(python, "-m", "pip", "install", "-q", "--no-deps", *TORCH)
        _run(python, "-m", "pip", "install", "-q", *PACKAGES)
        make_stand_ins(folder / "lib" / f"python{PYTHON_VERSION}" / "site-packages")
        _run(python, "-c", "import torch")
        complete.write_text(packages)
    return python


def compile_kernels(python: Path, folder: Path) -> bool:
    """Compile the kernels of the engines that the steps load and of their checks, and pack them."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {**TRITON_VARIABLES, "TRITON_CACHE_DIR": cache, "TRITON_STORE_BINARY_ONLY": "1",
                     "PYTHONPATH": str(ROOT)}
        for given in COMPILED:
            printed = _run(python, "-m", "tests.first_quarter.compile_for_gpu", *given, **variables)
            print(f"  {' '.join(given)}: {printed.splitlines()[-1]}", flush=True)
        with tarfile.open(folder / KERNELS, "w:xz") as archive:
            archive.add(cache, ".")
    key = _run(python, "-c", "from tests.first_quarter.facts import triton_key; print(triton_key())")
    (folder / KEY_FILE).write_text(key)
    return True


def keep_from_git(folder: Path, repository: Path) -> None:
    """Add the folder to the files that git excludes in this clone, unless it is excluded already."""
    found = _run("git", "-C", repository, "rev-parse", "--git-path", "info/exclude")
    exclude, line = repository / found.strip(), f"/{folder.as_posix()}/"
    before = exclude.read_text() if exclude.exists() else ""
    if line not in before.splitlines():
        exclude.parent.mkdir(exist_ok=True)
        exclude.write_text(before + line + "\n")


def _run(*command: object, **variables: str) -> str:
    """Run a command in the root of the repository, and return its output. Raises CalledProcessError if it fails."""
    return subprocess.run([str(one) for one in command], cwd=ROOT, check=True, text=True, capture_output=True,
                          env={**os.environ, **variables}).stdout
