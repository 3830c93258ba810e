"""Draw the measurements of `tests.benchmarks.scaling`: SVG plots and tables.

    python -m tests.benchmarks.scaling.draw scaling.json --out FOLDER                      four files, tables printed
    python -m tests.benchmarks.scaling.draw scaling.json --out FOLDER --page docs/scaling.md

--page writes the tables, the command of the measurement and links to the plots into a Markdown file, between two marker
lines. The same measurements always give the same files. Exit status 1: a file cannot be read or written, or has no
measurements.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.line_plot import Line, LinePlot, Point
from tests.benchmarks.marked_part import written_between

BEGIN = "<!-- written by python -m tests.benchmarks.scaling.draw: begin -->"
END = "<!-- written by python -m tests.benchmarks.scaling.draw: end -->"
MIDDLE = "points: medians; bars: 10th to 90th percentile"
WHERE = {"active": "in the scheduler's sight", "queued": "in the manager's queue"}

SERIES = ("batch", "context", "waiting")

Result = dict[str, Any]
Row = dict[str, Any]


# ---------------------------------------------------------------------- plots


def plots(result: Result) -> dict[str, LinePlot]:
    """Return file name -> plot of a series of the measurements. Raises LookupError if a field is missing."""
    context, batch = result["batch"][0]["context"], result["context"][0]["batch"]
    generating = result["waiting"][0]["generating"]
    return {
        "batch-time.svg": LinePlot(
            "Time of a decode step by batch", f"{context} tokens of prompt each; {MIDDLE}",
            "requests in the step", "milliseconds",
            [Line("", [_milliseconds(row, "batch") for row in result["batch"]])], doubles_x=True),
        "batch-rate.svg": LinePlot(
            "Tokens a second by batch", f"{context} tokens of prompt each; {MIDDLE}",
            "requests in the step", "generated tokens a second", [Line("", [_rate(row) for row in result["batch"]])],
            doubles_x=True),
        "context-time.svg": LinePlot(
            "Time of a decode step by context", f"{batch} requests in the step; {MIDDLE}",
            "tokens of each request in the KV cache", "milliseconds",
            [Line("", [_milliseconds(row, "mean_context") for row in result["context"]])]),
        "waiting-time.svg": LinePlot(
            "The host's work by waiting requests", f"{generating} others generate; {MIDDLE}",
            "waiting requests", "microseconds an iteration",
            [Line(words, [_microseconds(row) for row in result["waiting"] if row["where"] == where])
             for where, words in WHERE.items()]),
    }


def _milliseconds(row: Row, x: str) -> Point:
    return Point(row[x], row["ms"]["median"], row["ms"]["p10"], row["ms"]["p90"])


def _microseconds(row: Row) -> Point:
    return Point(row["waiting"], row["us"]["median"], row["us"]["p10"], row["us"]["p90"])


def _rate(row: Row) -> Point:
    """Return the point of a plot for one measured batch size: the rate in tokens/s at the median step time.

    The bar through the point runs from the rate at the 90th percentile of the step time to the rate at the 10th.
    """
    median, low, high = (1e3 * row["batch"] / row["ms"][name] for name in ("median", "p90", "p10"))
    return Point(row["batch"], median, low, high)


# ---------------------------------------------------------------------- text


def tables(result: Result) -> dict[str, str]:
    """Return name of a series -> its Markdown table."""
    step = ["ms: median", "10th to 90th percentile", "shortest", "tokens a second", "threads",
            "cores taken by others"]

    def steps(row: Row) -> list[str]:
        ms = row["ms"]
        return [f"{ms['median']:.2f}", f"{ms['p10']:.2f} to {ms['p90']:.2f}", f"{ms['min']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                "-" if row["compute_threads"] is None else f"{row['compute_threads']:.3g}",
                f"{row['foreign_cores']:.2f}"]

    waiting: dict[int, dict[str, Row]] = {}
    for row in result["waiting"]:
        waiting.setdefault(row["waiting"], {})[row["where"]] = row
    return {
        "batch": _table(["requests", "tokens of each", *step],
                        [[f"{row['batch']}", f"{row['mean_context']:.0f}", *steps(row)] for row in result["batch"]]),
        "context": _table(["tokens of each", "requests", *step],
                          [[f"{row['mean_context']:.0f}", f"{row['batch']}", *steps(row)]
                           for row in result["context"]]),
        "waiting": _table(
            ["waiting requests", *(f"{words}, us: median (10th to 90th percentile)" for words in WHERE.values())],
            [[f"{count:,}", *(_of_the_host(rows[where]) for where in WHERE)] for count, rows in waiting.items()]),
    }


def _of_the_host(row: Row) -> str:
    return f"{row['us']['median']:.0f} ({row['us']['p10']:.0f} to {row['us']['p90']:.0f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)])


def measured_on(result: Result) -> str:
    """Describe machine, versions, commit and model."""
    machine, model = result["machine"], result["model"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['extensions'])}); {versions}; commit "
        f"`{result['commit']}`, {result['date']}. {model['architecture']} with {model['weights'] / 1e6:.1f}M weights: "
        f"hidden {model['hidden_size']}, {model['layers']} layers, {model['heads']} query and {model['kv_heads']} key "
        f"heads of {model['head_size']}, vocabulary {model['vocab_size']:,}; {result['dtype']}, "
        f"{result['threads']} threads.")


def page(result: Result, folder: str) -> str:
    """Return the part of the page that has the measurements. `folder` is the plots' folder, relative to the page."""
    found = tables(result)
    pictures = {name: f"![{plot.title}]({folder}/{name})" for name, plot in plots(result).items()}
    return "\n\n".join([
        measured_on(result), f"```\n{result['command']}\n```",
        "### Batch", pictures["batch-time.svg"], pictures["batch-rate.svg"], found["batch"],
        "### Context", pictures["context-time.svg"], found["context"],
        "### Waiting requests", pictures["waiting-time.svg"], found["waiting"]])


def written_into(text: str, part: str) -> str:
    """Return the page `text` with `part` between the page's marker lines. Raises ValueError if they are missing."""
    return written_between(text, BEGIN, f"\n\n{part}\n\n", END, what="the page", belongs="the measurements belong")


def read(path: Path) -> Result:
    """Read the measurements of a file.

    Raises ValueError if the file is not a result of `tests.benchmarks.scaling`, or if a series has no measurements.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or result.get("tool") != "scaling":
        raise ValueError(f"{path} is not a result of tests.benchmarks.scaling")
    if empty := [series for series in SERIES if not result.get(series)]:
        raise ValueError(f"{path} has no measurements of the series {', '.join(empty)}; measure again")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.scaling.draw", description=__doc__)
    parser.add_argument("result", type=Path, help="JSON file of tests.benchmarks.scaling")
    parser.add_argument("--out", type=Path, required=True, help="folder for the plots")
    parser.add_argument("--page", type=Path, help="Markdown file to update with plots and tables")
    options = parser.parse_args(argv)
    try:
        result = read(options.result)
        drawn = {name: plot.render() for name, plot in plots(result).items()}
        if options.page is None:
            text = "\n\n".join([measured_on(result), *tables(result).values()])
        else:
            folder = Path(os.path.relpath(options.out, options.page.parent)).as_posix()
            text = written_into(options.page.read_text(encoding="utf-8"), page(result, folder))
        options.out.mkdir(parents=True, exist_ok=True)
        for name, svg in drawn.items():
            (options.out / name).write_text(svg, encoding="utf-8")
        if options.page is not None:
            options.page.write_text(text, encoding="utf-8")
    except (OSError, ValueError, LookupError) as error:
        print(f"scaling.draw: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.page is None:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
