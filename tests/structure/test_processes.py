"""A test that hangs costs that test only: a run names it, shows where it stands, goes on without it, and ends.

Waits of tests for threads and processes have limits of their own, so that a test fails before.
"""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from tests.harness import processes
from tests.harness.waiting import has_ended, until

from .bounds import unbounded_waits

HANGING = """
import subprocess, sys, time
import pytest

def test_before(): pass

def test_that_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open({child!r}, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

@pytest.mark.parametrize("number", range(3))
def test_after(number): pass
"""
FAILING = """
import time
import pytest

@pytest.fixture
def slow_end():
    yield
    time.sleep(600)

def test_that_fails_and_hangs(slow_end): assert False
def test_after(): pytest.skip("needs a CUDA device")
"""
SHORT = """
import pytest

@pytest.mark.parametrize("number", range(2))
def test_short(number): pass
"""


def test_a_hanging_test_is_named_and_the_run_goes_on_and_ends(tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGING.format(child=str(tmp_path / "child")))
    (tmp_path / "test_failing.py").write_text(FAILING)
    for number in range(4):
        (tmp_path / f"test_short_{number}.py").write_text(SHORT)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--no-unexpected-skips", "-c", os.devnull,
         "-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.harness.processes", "-p", "tests.harness.skips",
         "-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, timeout=200)
    output = result.stdout + result.stderr
    assert result.returncode == 1, output
    for line in ("3 failed, 12 passed, 1 skipped", "crashed while running 'test_hanging.py::test_that_hangs'",
                 "crashed while running 'test_failing.py::test_that_fails_and_hangs'", "1 needs a CUDA device"):
        assert line in result.stdout, (line, output)
    for line in ("in test_that_hangs", "in slow_end"):
        assert line in result.stderr, (line, output)
    until(lambda: has_ended((tmp_path / "child").read_text()))          # a zombie until the system asks for its status


def test_processes_get_the_files_in_the_order_of_collection_whatever_their_number_of_tests():
    """tests/conftest.py puts the longest files first."""
    config = mock.Mock(**{"getoption.return_value": "load", "getvalue.return_value": ["popen"]})
    scheduler, process = processes.pytest_xdist_make_scheduler(config, mock.Mock()), mock.Mock(shutting_down=False)
    scheduler.add_node(process)
    scheduler.add_node_collection(process, ["long.py::one", *(f"short.py::{number}" for number in range(5))])
    scheduler.schedule()
    assert [call.args for call in process.send_runtest_some.call_args_list] == [([0],), ([1, 2, 3, 4, 5],)]


def test_each_run_has_this_limit():
    with open("pyproject.toml", "rb") as file:
        options = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    # Hypothesis shrinks a failing example for up to 300 seconds.
    assert options["faulthandler_timeout"] > 330 and options["faulthandler_exit_on_timeout"] is True


# Files of waits that another limit ends -> why.
LIMITED = {
    "tests/examples/test_triton_repository.py": "`result` of its own class, which waits with a limit",
    "tests/parallel/test_exchange.py": "work of torch.distributed, whose groups have a limit",
    "tests/runtime/device": "a Readback on a CPU waits for nobody",
    "tests/sweep/processes.py": "processes that their parent ends",
}
# Programs, and the interleavings, whose scheduler has limits of its own.
NO_TESTS = ("campaigns", "first_quarter", "interleaving", "benchmarks")
FILES = [path for path in sorted(Path("tests").rglob("*.py"))
         if not set(path.parts) & set(NO_TESTS) or path.parent.name == "tests"]


def test_waits_for_threads_and_processes_have_limits():
    found = {f"{path}:{line}: {wait}" for path in FILES for line, wait in unbounded_waits(ast.parse(path.read_text()))}
    wrong = [wait for wait in sorted(found) if not wait.startswith(tuple(LIMITED))]
    assert not wrong, "\n".join([*wrong, "give each a limit in seconds, or use `until` of tests/harness/waiting.py"])
    assert all(any(wait.startswith(place) for wait in found) for place in LIMITED)


@pytest.mark.parametrize("line, count", [
    ("thread.join()", 1), ("thread.join(5)", 0), ("future.result(timeout=5)", 0), ("process.communicate()", 1),
    ("subprocess.run(['a'])", 1), ("subprocess.run(['a'], timeout=5)", 0), ("subprocess.run(['a'], **options)", 0),
    ("', '.join(words)", 0), ("while not ready: time.sleep(1)", 1), ("while monotonic() < end: sleep(1)", 0),
    ("async def f(): await event.wait()", 0), ("while not ready: step()", 0)])
def test_what_has_no_limit_is_found(line, count):
    assert len(list(unbounded_waits(ast.parse(line)))) == count
