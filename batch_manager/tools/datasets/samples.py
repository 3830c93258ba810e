"""Open a file of requests, or one of two synthetic traces, which are made in memory when they are read."""

import io
import os
from collections.abc import Callable
from pathlib import Path

from .errors import DatasetError
from .source import Source
from .synthetic import ChatShape, TraceShape, sample_arrivals, sample_conversations
from .writing import azure_lines, mooncake_lines

SAMPLE_ROWS = 1000
# Name -> function that yields its lines. `batch-manager workload sample-trace` writes the same bytes.
SAMPLES: dict[str, Callable] = {
    "sample:azure": lambda: azure_lines(sample_arrivals(SAMPLE_ROWS, 0, TraceShape())),
    "sample:mooncake": lambda: mooncake_lines(sample_conversations(SAMPLE_ROWS, 0, TraceShape(), ChatShape()))}


def open_source(path: str | os.PathLike) -> Source:
    """Open the file or pipe `path`, or the trace whose name it is. Raises DatasetError."""
    name = os.fspath(path)
    if name in SAMPLES:
        return Source(name, io.BufferedReader(io.BytesIO("".join(SAMPLES[name]()).encode())))
    try:
        return Source(name, Path(path).open("rb"))
    except OSError as error:
        raise DatasetError(name, f"the file cannot be opened: {error.strerror or error}",
                           f"expected a file of requests, or {' or '.join(SAMPLES)}", "correct the path") from None
