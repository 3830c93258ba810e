"""Write either all output files of a benchmark, or none."""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ..output_file import OutputFiles
from .plots import plots, write_plots
from .session import Served
from .summary import csv_rows


def write_files(options: argparse.Namespace, result: dict[str, Any], points: Sequence[Mapping[str, Any]],
                served: Sequence[Served]) -> None:
    """Write every file that the options name, except the trace. Raises OSError."""
    with OutputFiles() as files:
        if options.out is not None:
            json.dump(result, files.open(options.out), indent=1)
        if options.output_csv is not None:
            csv.writer(files.open(options.output_csv)).writerows(csv_rows(points))
        if options.responses_json_file is not None:
            json.dump(responses(served[0], options), files.open(options.responses_json_file))
        if options.stats_csv is not None:
            write_stats(served[0].records, files.open(options.stats_csv))
        if options.plot is not None:
            write_plots(options.plot, plots(result, points, served), files)


def responses(served: Served, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one object per request, in the order of the workload: id, output tokens and error.

    The output tokens include the prompt if the engine's responses include it.
    """
    includes_prompt = not options.exclude_input_in_output_seq and not options.streaming
    return [{"id": request["id"],
             "output_ids": (request["prompt"] if includes_prompt else []) + served.receipts[request["id"]].tokens,
             "error": served.receipts[request["id"]].error} for request in served.requests]


def write_stats(records: list[str], file: IO[str]) -> None:
    """Write the statistics of the manager as CSV, one row per iteration."""
    rows = [json.loads(record) for record in records]
    names = sorted({name for row in rows for name in row})
    writer = csv.DictWriter(file, names, restval=0)
    writer.writeheader()
    writer.writerows(rows)
