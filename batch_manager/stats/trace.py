"""Traces of iterations, for pictures, simulations and bug reports. They hold ids and counts, no tokens."""

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
    generation   ids of requests that generated
    paused, finished   ids of requests that were paused, and of those that ended
    arrived      ids of requests accepted at the start of the iteration, whether they ran or wait
    started_at_s   start of the iteration, in seconds of the engine's clock
    phases_us    phase -> microseconds, for phases that ran. `fetch`: admit requests; `schedule`: make and check the
                 plan; `claim`: claim its blocks; `start`: launch the step; `read`: wait for the oldest step in flight;
                 `advance`: append its tokens; `respond`: send responses; `poll`: poll stop signals
    waiting      reason -> ids of the active requests in no step; see batch_manager/scheduling/waiting.py for reasons
    queued_requests   accepted requests that wait to become active
    live_blocks, cached_blocks, free_blocks   KV cache blocks after the launch: held by sequences; held by none, but
                 reusable; empty
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
    """A list of iterations. Pass its `append` as `Parts(trace=...)`."""

    iterations: list[IterationTrace] = field(default_factory=list)

    def append(self, iteration: IterationTrace) -> None:
        self.iterations.append(iteration)


class TraceWriter:
    """Writes a trace to an open binary file: first the header, then each iteration that it is called with. The caller
    flushes and closes the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        file.write(_HEADER)

    def __call__(self, iteration: IterationTrace) -> None:
        self._file.write(orjson.dumps(iteration, option=orjson.OPT_APPEND_NEWLINE))


class TraceFile:
    """Writes a trace to a file while the engine runs: `Parts(trace=TraceFile("trace.jsonl"))`.

    path                    file to overwrite: one line of JSON with the format and its version, then one line per
                            iteration
    seconds_between_flushes   a crash of the process loses the iterations since the last flush

    Call it from one thread at a time. Raises OSError if the file cannot be written.
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
        """Write buffered iterations and close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_trace(iterations: Iterable[IterationTrace], file: IO[bytes]) -> None:
    """Write iterations in the format of TraceFile."""
    write = TraceWriter(file)
    for iteration in iterations:
        write(iteration)


def read_trace(file: IO[bytes]) -> Iterator[IterationTrace]:
    """Yield the iterations of a trace. Skips an incomplete last line, which a crash can leave.

    Raises ValueError, naming the line, for any other fault.
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
            raise ValueError(f"line {number} is not an iteration of a trace; expected one JSON object with "
                             f"{', '.join(f.name for f in fields(IterationTrace))}") from error


def _check_header(line: bytes) -> None:
    try:
        header = orjson.loads(line)
        is_trace, version = header["format"] == FORMAT, header["version"]
    except (TypeError, KeyError, ValueError):
        is_trace, version = False, None
    if not is_trace:
        raise ValueError(f"line 1 is not the header of a trace; expected {_HEADER.decode().strip()}; pass a file that "
                         "a TraceFile wrote")
    if version != VERSION:
        raise ValueError(f"line 1: the trace has version {version!r}; expected {VERSION}; read it with the "
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
