"""Reports of GPUs that this package was measured on: JSON lines, one file for each run.

Owns     the files, their names, and which of them is the newest
Not      what is measured, which is `gpu_report`'s; there are no dry runs here, and nothing written by hand
Yours    `python -m batch_manager.tools.gpu_table --add FOLDER/gpu_report.jsonl` adds a run, and a table to docs/
"""

import re
from pathlib import Path
from typing import Any

from ..gpu_report.records import MEASURED, read

FOLDER = Path(__file__).parent


def newest(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The lines of the run with the latest date; none where nothing was measured. Raises ValueError for a bad file."""
    runs = [lines for path in sorted(folder.glob("*.jsonl")) if (lines := read(path))]
    return max(runs, key=lambda lines: lines[0]["date"], default=[])


def add(report: Path, folder: Path = FOLDER) -> Path:
    """Copy a report here under the name of its date and device; the new file.

    Raises ValueError for a report without a measured line, or one whose commit is unknown or differs from the tree.
    """
    lines = read(report)
    if not any(line["status"] == MEASURED for line in lines):
        raise ValueError(f"nothing was measured in {report}; a dry run is no result")
    if lines[0]["commit"] == "unknown" or lines[0]["commit"].endswith("+"):
        raise ValueError(f"the commit of {report} is {lines[0]['commit']!r}; a result says which commit it is of: run "
                         "gpu_report on a clean checkout, or with --commit")
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{lines[0]['date']} {lines[0]['device']}").strip("-")
    target = folder / f"{name}.jsonl"
    target.write_text(report.read_text())
    return target
