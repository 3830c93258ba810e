"""What every iteration did to whom: for pictures, simulations and bug reports. Ids and counts, no tokens."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import IO, Any, Self

import orjson

FORMAT, VERSION = "batch_manager trace", 1
BUFFER_BYTES = 1 << 20
_HEADER = orjson.dumps({"format": FORMAT, "version": VERSION}, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class IterationTrace:
    """One iteration.

    context      (request id, first position, tokens) of each chunk
    generation   request ids
    paused, finished   request ids
    arrived      request ids accepted at the start of the iteration, whether they ran in it or wait
    started_at_s   when the iteration began, in seconds of the engine's clock
    phases_us    phase -> microseconds. `fetch`: admit requests; `schedule`: make and check the plan; `claim`: take its
                 blocks; `start`: launch the step; `read`: wait for the oldest step in flight; `advance`: append its
                 tokens; `respond`: send responses; `poll`: poll stop signals. A phase that did not run is not there
    waiting      reason -> ids of the active requests that were in no step; the reasons are those of
                 batch_manager/scheduling/waiting.py
    queued_requests   accepted requests that wait for a place among the active ones
    live_blocks, cached_blocks, free_blocks   of the KV cache, after the step was launched: held by sequences, held by
                 none but reusable, and empty
    """

    iteration: int
    context: tuple[tuple[int, int, int], ...]
    generation: tuple[int, ...]
    paused: tuple[int, ...]
    finished: tuple[int, ...]
    arrived: tuple[int, ...] = ()
    started_at_s: float = 0.0
    phases_us: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    queued_requests: int = 0
    live_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0


@dataclass(slots=True)
class Trace:
    """An append-only list of iterations; give its `append` to `Parts(trace=...)`."""

    iterations: list[IterationTrace] = field(default_factory=list)

    def append(self, iteration: IterationTrace) -> None:
        self.iterations.append(iteration)


class TraceWriter:
    """Writes the header of a trace to a file that is open for bytes, and each iteration that it is called with. The
    file stays the caller's to flush and to close."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        file.write(_HEADER)

    def __call__(self, iteration: IterationTrace) -> None:
        self._file.write(orjson.dumps(iteration, option=orjson.OPT_APPEND_NEWLINE))


class TraceFile:
    """Writes a trace to a file while the engine runs: `Parts(trace=TraceFile("trace.jsonl"))`.

    path                    of the file, which is written anew: one line of JSON for the format and its version, then
                            one an iteration
    seconds_between_flushes   after a crash of the process, the iterations since the last flush are missing

    One thread at a time calls it. Raises OSError where the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, seconds_between_flushes: float = 1.0) -> None:
        self._file = open(path, "wb", buffering=BUFFER_BYTES)
        self._write = TraceWriter(self._file)
        self._seconds = seconds_between_flushes
        self._flush_at = time.monotonic() + seconds_between_flushes

    def __call__(self, iteration: IterationTrace) -> None:
        self._write(iteration)
        now = time.monotonic()
        if now >= self._flush_at:
            self._flush_at = now + self._seconds
            self._file.flush()

    def close(self) -> None:
        """Write the rest and close the file. Does nothing the second time."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_trace(iterations: Iterable[IterationTrace], file: IO[bytes]) -> None:
    """Write what a TraceFile would."""
    write = TraceWriter(file)
    for iteration in iterations:
        write(iteration)


def read_trace(file: IO[bytes]) -> Iterator[IterationTrace]:
    """The iterations of a trace. The last line may be cut off, as a crash leaves it: it is left out.

    Raises ValueError, which names the line, for anything else.
    """
    _check_header(file.readline())
    for number, line in enumerate(file, 2):
        if not line.strip():
            continue
        try:
            yield _iteration(orjson.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if not line.endswith(b"\n") and isinstance(error, orjson.JSONDecodeError):
                return
            raise ValueError(f"line {number} is no iteration of a trace; expected one JSON object with "
                             f"{', '.join(f.name for f in fields(IterationTrace))}") from error


def _check_header(line: bytes) -> None:
    try:
        header = orjson.loads(line)
        is_trace, version = header["format"] == FORMAT, header["version"]
    except (TypeError, KeyError, ValueError):
        is_trace, version = False, None
    if not is_trace:
        raise ValueError(f"line 1 is not the header of a trace; expected {_HEADER.decode().strip()}; a TraceFile "
                         "writes one")
    if version != VERSION:
        raise ValueError(f"line 1: the trace is of version {version!r}; expected {VERSION}; read it with the "
                         "batch_manager that wrote it")


def _iteration(record: dict[str, Any]) -> IterationTrace:
    return IterationTrace(
        iteration=int(record["iteration"]),
        context=tuple((int(request_id), int(start), int(tokens)) for request_id, start, tokens in record["context"]),
        generation=tuple(int(request_id) for request_id in record["generation"]),
        paused=tuple(int(request_id) for request_id in record["paused"]),
        finished=tuple(int(request_id) for request_id in record["finished"]),
        arrived=tuple(int(request_id) for request_id in record.get("arrived", ())),
        started_at_s=float(record.get("started_at_s", 0.0)),
        phases_us={str(phase): int(time) for phase, time in record.get("phases_us", {}).items()},
        waiting={str(reason): tuple(map(int, ids)) for reason, ids in record.get("waiting", {}).items()},
        queued_requests=int(record.get("queued_requests", 0)),
        live_blocks=int(record.get("live_blocks", 0)),
        cached_blocks=int(record.get("cached_blocks", 0)),
        free_blocks=int(record.get("free_blocks", 0)),
    )
