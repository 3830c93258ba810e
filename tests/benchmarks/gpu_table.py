"""Write the newest GPU report into docs/performance.md, or a note that no GPU was measured.

    python -m tests.benchmarks.gpu_table                                        from the files in gpu_results
    python -m tests.benchmarks.gpu_table --add FOLDER/gpu_report.jsonl          add a result first
    python -m tests.benchmarks.gpu_table --check                                check that the page is current

The program replaces the text between two marker lines of the page. Exit status 1: with --check, the page differs; or a
file cannot be read or written, or is not a report.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.standard_output import reported
from tests.benchmarks.gpu_report.goals import ALL
from tests.benchmarks.gpu_report.records import number, value, verdict
from tests.benchmarks.gpu_results import add, newest
from tests.benchmarks.marked_part import written_between

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN = "<!-- written by python -m tests.benchmarks.gpu_table: begin -->"
END = "<!-- written by python -m tests.benchmarks.gpu_table: end -->"
# Goals whose cases are not in the table.
LEFT_OUT = ("correctness", "decode-split", "fact", "profile", "sampling", "settings")
NOT_MEASURED = "Not measured: no GPU has run this version."


def text_of(lines: Sequence[dict[str, Any]]) -> str:
    """Format the lines of a report for docs/performance.md. Without lines, return a note that nothing was measured."""
    if not lines:
        return NOT_MEASURED
    first = lines[0]
    versions = ", ".join(f"{package} {version}" for package, version in first["versions"].items())
    rows = ["| goal | | case | value | of | ratio | floor | met |", "|---|---|---|---|---|---|---|---|"]
    rows += [f"| {line['goal']} | {ALL[line['goal']].text} | {_case(line)} | {value(line)} "
             f"| {number(line['denominator'])} | {number(line['ratio'])} | {number(line['floor'])} "
             f"| {verdict(line)} |" for line in lines if line["goal"] not in LEFT_OUT]
    wrong = [line["case"] for line in lines if line["goal"] == "correctness" and line["status"] != "measured"]
    checked = sum(line["goal"] == "correctness" for line in lines) - len(wrong)
    kernels = f"{checked} kernels were right by value"
    kernels += f"; wrong or not reached: {', '.join(wrong)}" if wrong else ""
    return "\n".join([f"{first['device']}, {versions}, commit `{first['commit']}`, {first['date']}. {kernels}.", "",
                      *rows])


def _case(line: dict[str, Any]) -> str:
    return line["case"] if not line["note"] else f"{line['case']} ({line['note']})"


def written_into(page: str, text: str) -> str:
    """Return the page with `text` as its generated part. Raises ValueError if the marker lines are missing."""
    return written_between(page, BEGIN, f"\n{text}\n", END, what="the page", belongs="the table belongs")


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.gpu_table", description=__doc__)
    parser.add_argument("--add", type=Path, help="report to add to the results first")
    parser.add_argument("--page", type=Path, default=PAGE, help="(that of the checkout)")
    parser.add_argument("--check", action="store_true", help="write nothing; compare only")
    options = parser.parse_args(argv)
    try:
        if options.add is not None and not options.check:
            print(f"added {add(options.add)}")
        before = options.page.read_text(encoding="utf-8")
        after = written_into(before, text_of(newest()))
    except (OSError, ValueError) as error:
        print(f"gpu_table: {error}", file=sys.stderr)
        return 1
    if before != after and options.check:
        print("gpu_table: the page differs from the newest result; run gpu_table without --check", file=sys.stderr)
        return 1
    if not options.check:
        options.page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(reported("gpu_table", main))
