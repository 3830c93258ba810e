"""Traces and datasets as text, and files that are written as a whole or not at all."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ..output_file import output_file, why_not_distinct, why_not_writable
from ..traffic import Arrival
from .csv_traces import AZURE, PLAIN
from .errors import DatasetError
from .mooncake import MILLISECONDS

STDOUT = "-"
FIRST_ARRIVAL = datetime(2026, 1, 1)
TICKS = 10**7    # of 100 ns in a second: the digits of Azure's times


def azure_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """CSV as Azure publishes it, from an invented date on. Times are rounded to 100 ns; block ids are left out."""
    yield ",".join(AZURE.names) + "\n"
    for arrival in arrivals:
        seconds, ticks = divmod(round(arrival.arrival_s * TICKS), TICKS)
        moment = FIRST_ARRIVAL + timedelta(seconds=seconds)
        yield f"{moment}.{ticks:07},{arrival.input_tokens},{arrival.output_tokens}\n"


def mooncake_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """JSON lines as Mooncake publishes them. Times are whole milliseconds where they are, and rounded to 1 us else."""
    for arrival in arrivals:
        milliseconds = round(arrival.arrival_s * MILLISECONDS, 3)
        yield json.dumps({"timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
                          "input_length": arrival.input_tokens, "output_length": arrival.output_tokens,
                          "hash_ids": list(arrival.prefix_ids)}) + "\n"


def csv_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """CSV with times that are read back exactly; block ids are left out."""
    yield ",".join(PLAIN.names) + "\n"
    for arrival in arrivals:
        yield f"{arrival.arrival_s!r},{arrival.input_tokens},{arrival.output_tokens}\n"


TRACE_LINES = {"azure": azure_lines, "mooncake": mooncake_lines, "csv": csv_lines}


def dataset_text(workload: dict[str, Any], name: str) -> str:
    """The workload as a dataset of gptManagerBenchmark: metadata and samples, with the delay from each to the next."""
    requests = sorted(workload["requests"], key=lambda request: request["arrival_s"])
    times = [request["arrival_s"] for request in requests]
    delays = [after - before for before, after in zip(times, times[1:])] + [0.0]
    figures = {"n": len(requests), "input_mean": round(workload["prompt_len"]["mean"], 3),
               "output_mean": round(workload["output_len"]["mean"], 3), "rate": workload["rate"],
               "seed": workload["seed"]}
    metadata = {"workload_type": name,
                "workload_name": "__".join(f"{key}:{value}" for key, value in figures.items())}
    return json.dumps({"metadata": metadata, "samples": [
        {"input_ids": request["prompt"], "output_len": request["max_tokens"], "task_id": -1, "delay": delay}
        for request, delay in zip(requests, delays, strict=True)]})


def write_file(path: str | os.PathLike, pieces: Iterable[str]) -> None:
    """Write the pieces; a file that is there is replaced when all are written. "-" is the standard output.

    Raises DatasetError when it cannot be written, BrokenPipeError where nothing reads the standard output any more, and
    what the pieces raise; the file is as it was then.
    """
    try:
        if os.fspath(path) == STDOUT:
            sys.stdout.writelines(pieces)
            sys.stdout.flush()
        else:
            with output_file(Path(path)) as file:
                file.writelines(pieces)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and os.fspath(path) == STDOUT:
            raise
        raise DatasetError(os.fspath(path), f"it cannot be written: {error.strerror or error}",
                           "expected a file that can be, and room for it", "correct the path, or make room") from None


def check_writable(path: str | os.PathLike, inputs: Mapping[str, str | os.PathLike[str]] | None = None) -> None:
    """Raise DatasetError if the file certainly cannot be written, or is one of the inputs.

    inputs   name of an argument -> the file that it names
    """
    if os.fspath(path) == STDOUT:
        return
    if why := why_not_writable(Path(path)) or why_not_distinct({"--out": Path(path)}, inputs or {}):
        raise DatasetError("", *why.split("; ", 2))
