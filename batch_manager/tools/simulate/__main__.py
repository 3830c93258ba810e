"""The program `batch-manager simulate`, and `python -m batch_manager.tools.simulate`."""

import argparse
import csv
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import BatchManagerError, counted
from ...stats.trace import read_trace
from ..__main__ import run_as
from ..bench.errors import BenchmarkError, InputError
from ..bench.result import read_result
from ..bench.summary import csv_rows
from ..compare.results import model_of
from ..output_file import OutputFiles
from ..provenance import commit_of_the_checkout, machine, versions
from ..standard_output import print_flushed
from .cost_fit import fit_cost
from .options import parse_options
from .report import run_table, sweep_plots, sweep_table
from .study import Study

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
PROGRAM = "batch-manager simulate"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    options = parse_options(argv)
    logging.getLogger("batch_manager").setLevel("WARNING")
    try:
        return _fit(options) if options.fit is not None else _simulate(options)
    except (BenchmarkError, BatchManagerError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _fit(options: argparse.Namespace) -> int:
    traces = []
    for path in options.fit:
        try:
            with open(path, "rb") as file:
                traces.append(list(read_trace(file)))
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
    cost = fit_cost(traces, {
        **_about_run(options.result), "traces": [path.name for path in options.fit], "variant": options.variant,
        "machine": machine(), "packages": versions("torch", "triton", "numpy"), "commit": commit_of_the_checkout()})
    if cost.error is not None:
        cost.error.check(options.max_fit_error / 100)
    cost.write(options.out)
    if options.report == "json":
        print_flushed(json.dumps(cost.record()))
    elif options.report == "table" and cost.error is not None:
        planned = "ahead of" if cost.is_asynchronous else "between"
        print_flushed(f"{counted(cost.about['steps'], 'step')}, planned {planned} steps; {cost.error.words()}")
    return DONE


def _about_run(path: Path | None) -> dict[str, Any]:
    """Return the fields of a run's result file that also hold for its simulation. Without a file, return no fields."""
    if path is None:
        return {}
    result = read_result(path)
    run = {name: result.get(name) for name in ("precision", "threads", "kv_precision", "cpu_compile",
                                               "model_implementation", "tokens_per_block", "busy_neighbours")}
    return {"model": model_of(result.get("command")), **run}


def _simulate(options: argparse.Namespace) -> int:
    study = Study(options)
    for note in () if options.quiet else study.notes:
        print(f"{PROGRAM}: {options.workload}: {note}", file=sys.stderr)
    with OutputFiles() as files:
        result = study.run(files)
        points = [{"n": result["n"], **point} for point in study.points]
        if options.out is not None:
            json.dump(result, files.open(options.out), indent=1)
        if options.output_csv is not None:
            csv.writer(files.open(options.output_csv)).writerows(csv_rows(points))
        if options.plot is not None:
            options.plot.mkdir(parents=True, exist_ok=True)
            for name, plot in sweep_plots(result).items():
                files.open(options.plot / name).write(plot.render())
    if options.report == "json":
        print_flushed(json.dumps(result))
    elif options.report == "table":
        print_flushed(run_table(result) if result["kind"] == "run" else sweep_table(result))
    for point in points:
        for failure in point["failures"]:
            print(f"{PROGRAM}: request {failure['id']}: {failure['error']}", file=sys.stderr)
    return FAILED if any(point["failed"] for point in points) else DONE


if __name__ == "__main__":
    raise SystemExit(run_as("simulate"))
