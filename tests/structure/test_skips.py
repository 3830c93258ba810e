"""No check is silently absent: a run says which tests it skipped, and `.ci/run` fails if one is unexpected."""

import os
import subprocess
import sys

import pytest

from tests.harness.skips import EXPECTED

SKIPPED = """
import pytest

def test_that_runs(): pass

@pytest.mark.parametrize("number", range(3))
def test_without_what_it_needs(number): pytest.skip({reason!r})
"""


def run(folder, reason, *options):
    (folder / "test_skipped.py").write_text(SKIPPED.format(reason=reason))
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, *options,
                           "-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.harness.skips", folder],
                          env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                          capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("reason", "options", "status", "line"), [
    ("needs a CUDA device", ["--no-unexpected-skips"], 0, "3 needs a CUDA device  [no GPU"),
    ("redis-server is not installed", ["--no-unexpected-skips"], 1, "3 UNEXPECTED redis-server is not installed"),
    ("redis-server is not installed", ["--no-unexpected-skips", "-n", "1"], 1, "3 UNEXPECTED redis-server is not"),
    ("could not import 'redis': No module", [], 0, "3 could not import 'redis': No module  [pip install -e"),
], ids=["expected", "unexpected", "in several processes", "locally"])
def test_a_skipped_test_is_expected_or_named(tmp_path, reason, options, status, line):
    result = run(tmp_path, reason, *options)
    assert (result.returncode, line in result.stdout) == (status, True), result.stdout + result.stderr


def test_ci_fails_for_an_unexpected_skip():
    with open(".ci/run") as script:
        assert " --no-unexpected-skips " in script.read()
    assert all(why and "\n" not in why for why in EXPECTED.values())
