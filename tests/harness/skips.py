"""A pytest plugin: prints the skipped tests by reason, and fails a run in which a check is silently absent.

    pytest -q -n 3 --no-unexpected-skips

With the option, the exit status is 1 if a test was skipped for a reason that is not in EXPECTED. `.ci/run` gives it,
after it has installed the programs that tests need. Without it, a run prints the reasons and what to install.
"""

import re
from collections import Counter

import pytest

# Regular expression of a whole reason -> why a complete environment skips the test too. One line each.
EXPECTED = {
    "needs a CUDA device|bfloat16 is compared by value on a GPU only": "no GPU; test_gpu_rehearsal.py runs most",
    "this processor .*|.*or this processor has no AVX-512 for bfloat16": "another processor",
    "refused on this machine: the product of .*": "another processor: torch's products depend on the row there",
    "this compiler does not know AMX": "GCC 10 and older",
    "this interpreter is not a free-threaded one": "another build of Python",
    r"Triton Inference Server was NOT tested: .*": "its stub needs NumPy 1; .ci/triton has an environment of its own",
}
MODULE = re.compile(r"could not import '([\w.]+)'")


def is_expected(reason: str) -> bool:
    return any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in EXPECTED)


def reason_of(report) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def way_out(reason: str) -> str:
    """Return what makes the tests run that are skipped for `reason`, or "" if the reason itself says it."""
    if is_expected(reason):
        return next(why for pattern, why in EXPECTED.items() if re.fullmatch(pattern, reason, re.DOTALL))
    if MODULE.search(reason) or "extra [" in reason:
        return 'pip install -e ".[test]"'
    return "" if "install" in reason else ".ci/run installs what it needs"


def pytest_addoption(parser):
    parser.addoption("--no-unexpected-skips", action="store_true",
                     help="fail if a test is skipped for a reason that tests/harness/skips.py does not list")


def skipped(config) -> Counter[str]:
    """Return reason -> number of tests, or of whole files, that were skipped for it so far."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    return Counter(reason_of(report) for report in reporter.stats.get("skipped", ())) if reporter else Counter()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("--no-unexpected-skips"):
        return
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and any(
            not is_expected(reason) for reason in skipped(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Print a line for each reason, unexpected ones last: number of tests, reason, what makes them run."""
    found = skipped(config)
    if not found:
        return
    terminalreporter.section("skipped, by reason")
    for reason, number in sorted(found.items(), key=lambda item: (not is_expected(item[0]), -item[1])):
        mark = "" if is_expected(reason) else "UNEXPECTED " if config.getoption("--no-unexpected-skips") else ""
        more = way_out(reason)
        terminalreporter.write_line(f"{number:5} {mark}{' '.join(reason.split())[:160]}{f'  [{more}]' if more else ''}")
