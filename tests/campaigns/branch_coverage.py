"""T14: every branch of the core is covered by a test, or listed with a reason in tests/campaigns/branches.py.

    python -m tests.campaigns --suite T14

Needs the package `coverage`. The seed has no effect. The tests run in `--jobs` processes; processes that they start are
measured too.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .branches import CORE, LEFT_OUT, UNTAKEN, Untaken
from .registry import Options, Summary

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Missing:
    """An uncovered branch from one line of a file to another. A negative `target_line` is the end of the function."""

    file: str
    line: int
    target_line: int
    source: str
    target: str

    def __str__(self) -> str:
        goes_to = f"line {self.target_line}: {self.target}" if self.target else "the end of the function"
        return f"{self.file}:{self.line}: {self.source!r} never goes on to {goes_to}"


SETTINGS = """
[run]
branch = true
source = {package}
data_file = {folder}/data
parallel = true
patch = subprocess
"""


def measure(folder: Path, jobs: int) -> dict:
    """Run the tests of the core in `jobs` processes. Returns the coverage report of the core's files."""
    settings, report = folder / "settings", folder / "report.json"
    settings.write_text(SETTINGS.format(package=ROOT / "batch_manager", folder=folder))
    tests = sorted({path for paths in CORE.values() for path in paths})
    selection = [f"--deselect={test}" for test in LEFT_OUT]

    def run_module(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, text=True, capture_output=True)
    ran = run_module("coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", "-x", "-n", str(jobs),
                     *selection, *tests)
    if ran.returncode:
        raise RuntimeError(f"the tests of the core failed under coverage:\n{ran.stdout[-4000:]}{ran.stderr[-2000:]}")
    include = ",".join(str(ROOT / path) if path.endswith(".py") else f"{ROOT / path}/*" for path in CORE)
    for arguments in (("combine", "-q"), ("json", "-q", f"--include={include}", "-o", str(report))):
        written = run_module("coverage", arguments[0], f"--rcfile={settings}", *arguments[1:])
        if written.returncode:
            raise RuntimeError(f"no report: {written.stdout}{written.stderr}")
    return json.loads(report.read_text())


def missing_branches(report: dict) -> list[Missing]:
    """Return the uncovered branches of a coverage report, with the source text of both lines of each branch."""
    missing = []
    for path, found in sorted(report["files"].items()):
        file = str((ROOT / path).relative_to(ROOT))
        lines = (ROOT / file).read_text().splitlines()
        for line, target in found["missing_branches"]:
            goes_to = lines[target - 1].strip() if target > 0 else ""
            missing.append(Missing(file, line, target, lines[line - 1].strip(), goes_to))
    return missing


def judge(missing: list[Missing], listed: tuple[Untaken, ...]) -> list[str]:
    """Return a message for each branch that is neither covered nor listed, and for each outdated entry of the list."""
    places = {(one.file, one.source, one.target) for one in missing}
    known = {(one.file, one.source, one.target) for one in listed}
    wrong = [str(one) for one in missing if (one.file, one.source, one.target) not in known]
    return wrong + [f"{one.file}: {one.source!r} to {one.target!r} is listed and was taken, or is not there any more"
                    for one in listed if (one.file, one.source, one.target) not in places]


def run(options: Options) -> Summary:
    if find_spec("coverage") is None:
        return Summary("T14: skipped", short=["the package `coverage` is not installed"])
    again = "python -m tests.campaigns --suite T14"
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = measure(Path(folder), options.jobs)
        except RuntimeError as error:
            return Summary("T14: nothing was measured", [f"{error}\n({again})"])
    branches = sum(found["summary"]["num_branches"] for found in report["files"].values())
    wrong = judge(missing_branches(report), UNTAKEN)
    return Summary(f"T14: {branches:,} branches in {len(report['files'])} files of {', '.join(CORE)}, "
                   f"{len(UNTAKEN)} of them listed with a reason", [f"{one} ({again})" for one in wrong])
