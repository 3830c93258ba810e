"""Write either all output files of a benchmark, or none."""

import argparse
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from ..output_file import OutputFiles
from .load import Load
from .plots import plots, write_plots
from .session import Served
from .stamps import Stamps
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
        if options.requests_csv is not None:
            csv.writer(files.open(options.requests_csv)).writerows(request_rows(served, streaming=options.streaming))
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


REQUEST_COLUMNS = ["run", "request_rate", "concurrency", "id", "arrival_ms", "prompt_tokens", "output_tokens",
                   "ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "error"]
TURN_COLUMNS = ["session", "turn"]


def request_rows(served: Sequence[Served], *, streaming: bool) -> Iterator[list[Any]]:
    """Yield a header, and a row for each request of each run. Times are milliseconds; a cell is empty if unknown.

    A workload with sessions has TURN_COLUMNS too. `run` counts the runs of a sweep or a search from 1. `arrival_ms`
    counts from the start of the run.
    """
    has_turns = any("turn" in request for run in served for request in run.requests)
    yield [*REQUEST_COLUMNS, *(TURN_COLUMNS if has_turns else [])]
    for number, run in enumerate(served, 1):
        ids = [request["id"] for request in run.requests]
        rows = request_rows_of(number, run.load, ids, Stamps.of_receipts(run.requests, run.receipts),
                               {request_id: run.receipts[request_id].error for request_id in ids}, streaming=streaming)
        for request, row in zip(run.requests, rows, strict=True):
            yield [*row, *(request.get(name, "") for name in TURN_COLUMNS if has_turns)]


def request_rows_of(number: int, load: Load, ids: Sequence[int], stamps: Stamps, errors: Mapping[int, str], *,
                    streaming: bool = True) -> Iterator[list[Any]]:
    """Yield the row of `request_rows` for each request of one run, the `number`-th.

    errors   id -> error of a failed request
    """
    latencies = [stamps.first_s - stamps.arrival_s, stamps.mean_gaps_s, stamps.last_s - stamps.arrival_s,
                 stamps.queue_s]
    for index, request_id in enumerate(ids):
        cells = ["" if math.isnan(column[index]) else round(float(column[index]) * 1e3, 3) for column in latencies]
        if not streaming:
            cells[:2] = "", ""
        yield [number, load.request_rate, load.concurrency, request_id,
               round(float(stamps.arrival_s[index]) * 1e3, 3), int(stamps.prompt_tokens[index]),
               int(stamps.tokens[index]), *cells, errors.get(request_id, "")]


def write_stats(records: list[str], file: IO[str]) -> None:
    """Write the statistics of the manager as CSV, one row per iteration."""
    rows = [json.loads(record) for record in records]
    names = sorted({name for row in rows for name in row})
    writer = csv.DictWriter(file, names, restval=0)
    writer.writeheader()
    writer.writerows(rows)
