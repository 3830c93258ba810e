"""The program `batch-manager bench`, and `python -m batch_manager.tools.bench`."""

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import BatchManagerError, counted
from ...extras.launch import parallel_config, rank_of
from ..__main__ import run_as
from ..compare.__main__ import main as compare
from ..standard_output import discard_standard_output
from .engine import follow_rank_0
from .errors import BenchmarkError, InputError
from .files import write_files
from .measurement import Measurement
from .options import LOG_LEVELS, parse_options
from .run import read_requests
from .saturation import Saturation
from .summary import lines, sweep_table, table

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None, *, program: str = "batch-manager bench") -> int:
    """Run the program and return its exit status.

    program   name of the program in messages
    """
    argv = [*(sys.argv[1:] if argv is None else argv)]
    if argv[:1] == ["--compare"]:
        return compare(argv[1:])
    options = parse_options(argv, program=program)
    logging.getLogger("batch_manager").setLevel(LOG_LEVELS[options.log_level])
    # torch reads this variable on import, for all of its threads. The manager's num_threads is applied later.
    os.environ.setdefault("OMP_NUM_THREADS", str(options.num_threads))
    measurement = None
    try:
        if rank_of(parallel_config(options.tensor_parallel_size, options.pipeline_parallel_size)) > 0:
            return follow_rank_0(options)
        workload, notes = read_requests(options)
        for note in notes if not options.quiet else ():
            print(f"{program}: {options.workload}: {note}", file=sys.stderr)
        measurement = Measurement(options, workload)
        result = measurement.run()
        points = [{"n": result["n"], **point} for point in measurement.points]
        try:
            print_report(options.report, result, points)
        except BrokenPipeError:                     # the reader closed the pipe, as `head` does
            discard_standard_output()
        finally:                                    # also if the standard output is closed or full
            write_files(options, result, points, measurement.served)
    except (InputError, BatchManagerError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except BenchmarkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if measurement is not None and (summary := measurement.so_far()):
            print(summary, file=sys.stderr)
        return INTERRUPTED
    return print_failures(points, program)


def print_report(kind: str, result: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
    """Print the results in the form `kind`, a value of --report."""
    if kind == "json":
        short = {name: value for name, value in result.items() if name != "first_tokens"}
        if "points" in short:
            short["points"] = [{name: value for name, value in point.items() if name != "first_tokens"}
                               for point in result["points"]]
        print(json.dumps(short), flush=True)
    elif kind == "lines":
        print(lines(points), flush=True)
    elif kind == "table":
        print(table(points[0]) if result["kind"] == "run" else sweep_table(points), flush=True)
    if kind in ("table", "lines") and "saturation" in result:
        print(f"\n{Saturation(**result['saturation']).words()}", flush=True)


def print_failures(points: Sequence[Mapping[str, Any]], program: str) -> int:
    """Print failed requests and the number of outputs of the wrong length on stderr.

    Returns the exit status: FAILED if a request failed or an output has the wrong length, otherwise DONE.
    """
    for point in points:
        if point["failed"]:
            print(f"{program}: {point['failed']} of {counted(point['n'], 'request')} failed:", file=sys.stderr)
            for failure in point["failures"]:
                print(f"  request {failure['id']}: {failure['error']}", file=sys.stderr)
            if point["failed"] > len(point["failures"]):
                print(f"  and {point['failed'] - len(point['failures'])} more", file=sys.stderr)
        if point["wrong_length"] > point["failed"]:
            wrong = counted(point["wrong_length"] - point["failed"], "other output")
            print(f"{program}: {wrong} of the wrong length", file=sys.stderr)
    return FAILED if any(point["wrong_length"] for point in points) else DONE


if __name__ == "__main__":
    raise SystemExit(run_as("bench"))
