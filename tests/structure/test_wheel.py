"""A wheel and a source distribution hold the files that they should, and no others."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from batch_manager.triton_kernels.cpu.native import build

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED_SETUPTOOLS = 77
LIBRARIES = {f"batch_manager/triton_kernels/cpu/native/in_wheels/step-{name}.so"
             for name, *_ in build.LEVELS.get(platform.machine(), ())}
has_compiler = pytest.mark.skipif(not LIBRARIES or not any(map(shutil.which, build.COMPILERS)),
                                  reason="there is no C compiler, or no list of instruction sets for this processor")


@pytest.fixture(scope="module")
def wheel(wheel_file):
    """Return the names of the files in a wheel of the checkout."""
    with zipfile.ZipFile(wheel_file) as archive:
        return archive.namelist()


# The rest of a script that takes the place of a compiler.
EMPTY_LIBRARY = 'while [ "$1" != -o ]; do shift; done\nexec cc -shared -o "$2" -x c /dev/null\n'


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    """Return the path of a wheel of the checkout. To save time, libraries are compiled without optimization, with the
    products of one type of blocks, and only the first one and that for this processor are there: tests/compiled compile
    those for older ones, and all types.

    The wheel is built from a copy, so that the checkout gets no build folder.
    """
    if importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel takes pip, and this environment has none")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    copy.mkdir()
    for name in ("batch_manager", "triton_kernels"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, copy / name)
    (copy / "README.md").touch()

    levels, processor = build.LEVELS.get(platform.machine(), ()), set(build._processor().split())
    whole = [*levels[:1], *[level for level in levels if processor.issuperset(level[2])][:1]]
    patterns = "".join(f"|*'{' '.join(options)} -o '*" for _, options, _ in whole)
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in --version{patterns}) exec cc "$@";; esac\n{EMPTY_LIBRARY}')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-w", str(folder)]
    isolated = installed_setuptools() < NEEDED_SETUPTOOLS       # pip fetches setuptools for an isolated build
    result = subprocess.run([*command, *([] if isolated else ["--no-build-isolation"]), str(copy)],
                            capture_output=True, text=True, timeout=300,
                            env={**os.environ, "CFLAGS": "-O0 -DTYPE=Q4_0", "CC": str(compiler) if whole else ""})
    nothing_fetched = r"(No matching distribution found for|Could not find a version .*) setuptools"
    if isolated and re.search(nothing_fetched, result.stderr):
        pytest.skip(f"building a wheel takes setuptools >= {NEEDED_SETUPTOOLS}; it is not installed and pip got none")
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory):
    """Return the folder of an unpacked source distribution of the checkout."""
    if installed_setuptools() < NEEDED_SETUPTOOLS:
        pytest.skip(f"a source distribution takes setuptools >= {NEEDED_SETUPTOOLS}; it is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(REPOSITORY, folder / "copy", symlinks=True, ignore=shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis", "*.gguf"))
    backend_call("build_sdist", folder / "copy", folder)
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def backend_call(function: str, source: Path, target: Path, **variables: str) -> str:
    """Run a function of setuptools' build backend in a folder, as `python -m build` does. Return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", f"import setuptools.build_meta as backend; backend.{function}({str(target)!r})"],
        cwd=source, capture_output=True, text=True, timeout=300, env={**os.environ, "CFLAGS": "-O0", **variables})
    assert result.returncode == 0, result.stderr
    return result.stdout


def installed_setuptools() -> int:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


def test_a_wheel_has_one_top_level_name(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"batch_manager"}


def test_a_wheel_holds_every_source_file_and_the_typing_marker(wheel):
    sources = {f"batch_manager/{path.relative_to(REPOSITORY / 'batch_manager').as_posix()}"
               for path in (REPOSITORY / "batch_manager").rglob("*.py")}
    kernels = {f"batch_manager/{path.relative_to(REPOSITORY).as_posix()}"
               for path in (REPOSITORY / "triton_kernels").rglob("*.py")}
    held = {name for name in wheel if name.endswith(".py")}
    assert held == sources | kernels
    assert "batch_manager/triton_kernels/__init__.py" in held
    assert "batch_manager/py.typed" in wheel
    compiled_here = {path.name for path in (REPOSITORY / "triton_kernels/cpu/native").glob("*.[ch]")}
    page = {f"batch_manager/tools/draw/page/{path.name}"
            for path in (REPOSITORY / "batch_manager/tools/draw/page").iterdir()}
    assert page and page <= set(wheel)
    assert compiled_here == {name.rpartition("/")[2] for name in wheel if name.endswith((".c", ".h"))} != set()


def test_a_wheel_has_no_other_files(wheel):
    """A wheel has no tests, no examples and no files that a run created."""
    known = (".py", "py.typed", ".c", ".h", ".js", ".css", ".html")
    assert {name for name in wheel if ".dist-info/" not in name and not name.endswith(known)} <= LIBRARIES
    metadata = {name.partition(".dist-info/")[2] for name in wheel if ".dist-info/" in name}
    assert metadata == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


@has_compiler
def test_a_wheel_runs_compiled_steps_without_a_compiler(wheel_file, wheel, tmp_path):
    """The wheel has the library for every level, is for this platform, and needs neither a compiler nor a cache."""
    assert set(wheel) >= LIBRARIES and wheel_file.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path / "installed")
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= {"PATH": "/nowhere", "PYTHONPATH": str(tmp_path / "installed"), "XDG_CACHE_HOME": str(tmp_path)}
    program = """
from batch_manager.extras.llm import LLM
import batch_manager
with LLM(MODEL, device="cpu", cpu_compile=True) as llm:
    tokens = llm.generate([[5]], max_tokens=4, temperature=0)[0].tokens
    print(batch_manager.__file__, llm.info.dispatch, repr(llm.info.not_compiled), len(tokens))
""".replace("MODEL", repr(str(REPOSITORY / "examples/models/austen-4m")))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                            env=environment)
    assert result.stdout.split() == [f"{tmp_path}/installed/batch_manager/__init__.py", "compiled", "''", "4"], (
        result.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


def test_a_wheel_without_a_compiler_is_for_all_platforms_and_says_so(source_distribution, tmp_path):
    """Also after a build with a compiler in the same folder."""
    stale = source_distribution / "build/lib/batch_manager/triton_kernels/cpu/native/in_wheels/step-v3.so"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    said = backend_call("build_wheel", source_distribution, tmp_path, PATH="/nowhere", CC="")
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl") and "NO COMPILED LIBRARY (found no C compiler" in said
    with zipfile.ZipFile(path) as archive:
        assert LIBRARIES.isdisjoint(archive.namelist())


def test_a_source_distribution_has_what_is_tracked(source_distribution):
    """A source distribution has every tracked file, including tests, examples and documents."""
    tracked = subprocess.run(["git", "-C", str(REPOSITORY), "ls-files", "-z"], capture_output=True, text=True,
                             timeout=300)
    if tracked.returncode:
        pytest.skip("there is no git repository to compare it with")
    missing = [name for name in tracked.stdout.split("\0") if name and (REPOSITORY / name).exists()
               and not (source_distribution / name).exists()]
    assert missing == []
    for name in ("tests/conftest.py", "examples/quickstart.py", "docs/contract.md", "CHANGELOG.md"):
        assert (source_distribution / name).is_file()


def test_a_source_distribution_builds_the_same_wheel(source_distribution, wheel, tmp_path):
    """The compiler only reads all sources and headers here, which is faster: the other wheel's library is whole."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncc -fsyntax-only "$@" || exit 1\n{EMPTY_LIBRARY}')
    compiler.chmod(0o755)
    backend_call("build_wheel", source_distribution, tmp_path, CC=str(compiler))
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == sorted(wheel)


def test_the_installation_in_use_has_one_top_level_name():
    try:
        names = importlib.metadata.distribution("batch-manager").read_text("top_level.txt")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path without being installed")
    assert names is None or names.split() == ["batch_manager"]
