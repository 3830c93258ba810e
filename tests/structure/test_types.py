"""mypy accepts the files that pyproject.toml names, and finds the mistakes in programs that use the package."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from batch_manager.requests.inference_request import _WIRE_NAMES
from batch_manager.requests.tensor_attributes import TensorAttributes

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("typed")
CACHE_OF_USERS = REPOSITORY / ".mypy_cache" / "users"          # in the cache of the first test
MOST_IGNORES = 5

needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None,
                                reason='mypy is not installed; pip install -e ".[test]" brings it')


def mypy(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run mypy with `arguments` in a folder, and return its exit status and output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    result = subprocess.run([sys.executable, "-m", "mypy", "--no-color-output", *arguments], cwd=folder,
                            env=environment, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout + result.stderr


@needs_mypy
def test_the_files_named_in_pyproject_have_no_type_errors():
    status, output = mypy(REPOSITORY)
    assert status == 0, output
    checked = int(re.search(r"no issues found in (\d+) source files", output)[1])
    assert checked >= 90


@pytest.fixture
def installation(tmp_path) -> Path:
    """Return the interpreter of an environment in which a type checker finds the package installed.

    Its site-packages has a link to the package's folder, and a path to the libraries of this environment.
    """
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (libraries,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (libraries / "batch_manager").symlink_to(REPOSITORY / "batch_manager", target_is_directory=True)
    (libraries / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "venv" / "bin" / "python"


@needs_mypy
def test_a_users_program_and_its_mistakes_are_told_apart(tmp_path, installation):
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    for program in PROGRAMS.glob("*.py"):
        (tmp_path / program.name).write_text(program.read_text(encoding="utf-8"), encoding="utf-8")

    _, output = mypy(tmp_path, "--strict", f"--python-executable={installation}", f"--cache-dir={CACHE_OF_USERS}",
                     "user_program.py", "user_mistakes.py")

    found = {(file, int(line), code) for file, line, code in re.findall(
        r"^([\w.]+):(\d+): error: .*\[([\w-]+)\]$", output, re.M)}
    lines = (PROGRAMS / "user_mistakes.py").read_text(encoding="utf-8").splitlines()
    expected = {("user_mistakes.py", number, line.partition("# expected: ")[2])
                for number, line in enumerate(lines, 1) if "# expected: " in line}
    assert len(expected) >= 10
    assert found == expected, output


def test_the_attributes_for_type_checkers_are_those_of_the_table():
    assert set(TensorAttributes.__annotations__) == set(_WIRE_NAMES)


def test_an_error_of_the_checker_is_ignored_seldom_and_by_its_code():
    """The source ignores at most MOST_IGNORES type errors, each by its code and after a comment with the reason."""
    wrong, count = [], 0
    for path in sorted((REPOSITORY / "batch_manager").rglob("*.py")):
        before = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "# type: ignore" in line:
                count += 1
                if "# type: ignore[" not in line or not before.lstrip().startswith("#"):
                    wrong.append(f"{path.relative_to(REPOSITORY)}:{number}")
            before = line
    assert wrong == []
    assert 0 < count <= MOST_IGNORES
