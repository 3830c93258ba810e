"""Format traces and datasets as text, and write either a whole file or no file."""

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
from .records import MOST_SECONDS

STDOUT = "-"
FIRST_ARRIVAL = datetime(2026, 1, 1)
TICKS = 10**7    # per second; a tick of 100 ns is the resolution of Azure's times


def azure_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """Yield the lines of a CSV file in Azure's format, with times that start at an arbitrary date.

    Times are rounded to 100 ns. Block ids are left out.
    """
    yield ",".join(AZURE.names) + "\n"
    for arrival in _readable(arrivals, MOST_SECONDS):
        seconds, ticks = divmod(round(arrival.arrival_s * TICKS), TICKS)
        moment = FIRST_ARRIVAL + timedelta(seconds=seconds)
        yield f"{moment}.{ticks:07},{arrival.input_tokens},{arrival.output_tokens}\n"


def mooncake_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """Yield the JSON lines of a file in Mooncake's format. Times are in milliseconds, rounded to 1 us."""
    for arrival in _readable(arrivals, MOST_SECONDS / MILLISECONDS):
        milliseconds = round(arrival.arrival_s * MILLISECONDS, 3)
        yield json.dumps({"timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
                          "input_length": arrival.input_tokens, "output_length": arrival.output_tokens,
                          "hash_ids": list(arrival.prefix_ids)}) + "\n"


def csv_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """Yield the lines of a CSV file with times in full precision. Block ids are left out."""
    yield ",".join(PLAIN.names) + "\n"
    for arrival in _readable(arrivals, MOST_SECONDS):
        yield f"{arrival.arrival_s!r},{arrival.input_tokens},{arrival.output_tokens}\n"


def _readable(arrivals: Iterable[Arrival], most_s: float) -> Iterator[Arrival]:
    """Yield the arrivals. Raises DatasetError at the first one whose time the reader of the format would refuse."""
    for arrival in arrivals:
        if arrival.arrival_s > most_s:
            raise DatasetError("", f"a request arrives at {arrival.arrival_s:g} s",
                               f"expected at most {most_s:g} s in this format",
                               "raise the rate, or take fewer requests")
        yield arrival


TRACE_LINES = {"azure": azure_lines, "mooncake": mooncake_lines, "csv": csv_lines}


def dataset_text(workload: dict[str, Any], name: str) -> str:
    """Return the workload as the JSON text of a dataset of gptManagerBenchmark.

    The dataset has metadata, and samples in the order of arrival with the delay until the next sample in seconds.
    """
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
    """Write the pieces to a file, or to the standard output if the path is "-".

    An existing file is replaced after all pieces are written, and stays unchanged after an error.

    Raises DatasetError if the file cannot be written, OSError if the standard output cannot, and the errors of the
    iterator `pieces`.
    """
    if os.fspath(path) == STDOUT:
        sys.stdout.writelines(pieces)
        sys.stdout.flush()
        return
    try:
        with output_file(Path(path)) as file:
            file.writelines(pieces)
    except OSError as error:
        raise DatasetError(os.fspath(path), f"the file cannot be written: {error.strerror or error}",
                           "expected a writable path and enough space") from None


def check_writable(path: str | os.PathLike, inputs: Mapping[str, str | os.PathLike[str]] | None = None) -> None:
    """Raise DatasetError if the output file certainly cannot be written, or is one of the inputs.

    inputs   name of an argument -> the file that it names
    """
    if os.fspath(path) == STDOUT:
        return
    if why := why_not_writable(Path(path)) or why_not_distinct({"--out": Path(path)}, inputs or {}):
        raise DatasetError("", *why.split("; ", 2))
