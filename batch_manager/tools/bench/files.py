"""The files that a benchmark writes, each whole or not at all."""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..whole_file import write_whole
from .plots import plots, write_plots
from .result import write_result
from .session import Served
from .summary import csv_rows


def write_files(options: argparse.Namespace, result: dict[str, Any], points: Sequence[Mapping[str, Any]],
                served: Sequence[Served]) -> None:
    """Every file that the options name. Raises OSError."""
    if options.out is not None:
        write_result(options.out, result)
    if options.output_csv is not None:
        write_whole(options.output_csv, lambda file: csv.writer(file).writerows(csv_rows(points)))
    if options.responses_json_file is not None:
        write_whole(options.responses_json_file, lambda file: json.dump(responses(served[0], options), file))
    if options.stats_csv is not None:
        write_stats(served[0].records, options.stats_csv)
    if options.plot is not None:
        write_plots(options.plot, plots(result, points, served))


def responses(served: Served, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What every request got: an object each, in the order of the workload. Prompts are in it where the responses had
    them."""
    includes_prompt = not options.exclude_input_in_output_seq and not options.streaming
    return [{"id": request["id"],
             "output_ids": (request["prompt"] if includes_prompt else []) + served.receipts[request["id"]].tokens,
             "error": served.receipts[request["id"]].error} for request in served.requests]


def write_stats(records: list[str], path: Path) -> None:
    """The statistics of the manager as CSV, one row an iteration. Raises OSError."""
    rows = [json.loads(record) for record in records]
    names = sorted({name for row in rows for name in row})

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, names, restval=0)
        writer.writeheader()
        writer.writerows(rows)
    write_whole(path, write)
