"""GPU reports of this package: JSON lines, one file per run.

Owns     the files, their names, and the choice of the newest
Not      the measurements, which `gpu_report` makes; dry runs and hand-written files do not belong here
Yours    `python -m tests.benchmarks.gpu_table --add FOLDER/gpu_report.jsonl` adds a run, and updates the table in
         docs/performance.md
"""

import re
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_report.records import MEASURED, read

FOLDER = Path(__file__).parent


def newest(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the lines of the latest run, or an empty list if the folder has no run.

    Raises ValueError for an invalid file.
    """
    runs = [lines for path in sorted(folder.glob("*.jsonl")) if (lines := read(path))]
    return max(runs, key=lambda lines: lines[0]["date"], default=[])


def add(report: Path, folder: Path = FOLDER) -> Path:
    """Copy a report into the folder, as a file named by date and device, and return the path of the copy.

    Raises ValueError for a report without a measured line, and for a report of an unknown commit or of a checkout with
    changes.
    """
    lines = read(report)
    if not any(line["status"] == MEASURED for line in lines):
        raise ValueError(f"{report} has no measured line; expected a result and not a dry run")
    if lines[0]["commit"] == "unknown" or lines[0]["commit"].endswith("+"):
        raise ValueError(f"the commit of {report} is {lines[0]['commit']!r}; expected a known commit without '+', "
                         "which stands for changed files; run gpu_report on a clean checkout, or with --commit")
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{lines[0]['date']} {lines[0]['device']}").strip("-")
    target = folder / f"{name}.jsonl"
    target.write_text(report.read_text())
    return target
