"""Records of each iteration, for pictures, simulations and bug reports. They contain ids and counts, but no tokens."""

import fcntl
import os
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import IO, Any, NoReturn, Self

import orjson

from ..contained_log import log
from ..errors import ConfigError

FORMAT, VERSION = "batch_manager trace", 1
BUFFER_BYTES = 1 << 20
LARGEST_ID, LARGEST_COUNT = 2**64 - 1, 2**53 - 1        # a browser holds no larger count exactly
_HEADER = orjson.dumps({"format": FORMAT, "version": VERSION}, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class IterationTrace:
    """What happened in one iteration.

    iteration    number; rises from one record to the next, with gaps
    context      (request id, first position, number of tokens) of each context chunk in the step
    generation   ids of the generating requests in the step
    paused, finished   ids of the requests that the plan paused, and of the accepted requests that ended
    arrived      ids of the requests accepted at the start of the iteration, whether they run in it or wait
    started_at_s   when the iteration began, in seconds of the engine's clock. Unless the engine was idle before, it
                 began when the phases of the previous iteration ended
    phases_us    phase -> microseconds, in the order in which the phases ran. `trace`: trace the previous iteration;
                 `get`: the get callback; `fetch`: admit requests; `schedule`: make and check the plan; `claim`: take
                 its blocks; `start`: launch the step; `read`: wait for the oldest step in flight; `advance`: append the
                 tokens of the step that was read; `respond`: send responses; `poll`: poll stop signals;
                 `after_responses`: the hook of this name; `report`: make the records of the iteration; `stats`: the
                 statistics callback. The phases add up to the iteration: a phase lasts from the end of the phase before
                 it to its own end. Phases that did not run are missing
    waiting      reason -> ids of the active requests that the plan left out; batch_manager/scheduling/waiting.py lists
                 the reasons
    queued_requests   number of accepted requests that are not active yet
    live_blocks, cached_blocks, free_blocks   numbers of KV cache blocks after the claim: blocks held by sequences,
                 reusable blocks that no sequence holds, and empty blocks
    end_reasons  name of a FinishReason or an ErrorCode -> ids of the requests that ended with it. Refused
                 requests are listed here only. Empty in traces written before this field existed
    arrived_at_s   when each request of `arrived` arrived, in seconds of the engine's clock: its arrival_time, or the
                 time of its admission if it has none. Empty in traces written before this field existed
    finished_at_s   when the final response of each request of `finished` was sent: the start of the send callback, in
                 seconds of the engine's clock. Empty in traces written before this field existed
    room         number of requests that get was asked for: how many further requests could become active at the start
                 of the iteration, less the queued requests; -1: any number. None in traces written before this field
                 existed
    settings     name -> value of the limits and policies of the engine, in its first iteration; otherwise empty
    form         form in which the step was launched, see docs/steps.md; "" if nothing was launched, if the launch
                 failed, and for a custom backend
    obstacles    earlier form -> the word for what kept the step out of it
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
    end_reasons: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    arrived_at_s: tuple[float, ...] = ()
    finished_at_s: tuple[float, ...] = ()
    room: int | None = None
    settings: Mapping[str, int | str] = field(default_factory=dict)
    form: str = ""
    obstacles: Mapping[str, str] = field(default_factory=dict)


REQUIRED = frozenset(f.name for f in fields(IterationTrace)) - {"end_reasons", "arrived_at_s", "finished_at_s", "room",
                                                                "settings", "form", "obstacles"}


@dataclass(slots=True)
class Trace:
    """A list of iterations. Pass its `append` as `Parts(trace=...)`."""

    iterations: list[IterationTrace] = field(default_factory=list)

    def append(self, iteration: IterationTrace) -> None:
        self.iterations.append(iteration)


class TraceWriter:
    """Write a trace to a binary file. The constructor writes the header, and each call writes one iteration.

    The caller flushes and closes the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        file.write(_HEADER)

    def __call__(self, iteration: IterationTrace) -> None:
        self._file.write(orjson.dumps(iteration, option=orjson.OPT_APPEND_NEWLINE))


class TraceFile:
    """Write a trace to a file while the engine runs: `Parts(trace=TraceFile("trace.jsonl"))`.

    path                      path of the file, which is overwritten. Each line is a JSON object: first the format and
                              its version, then one line for each iteration
    seconds_between_flushes   0 or more; a crash of the process loses the iterations since the last flush

    Only one thread at a time may call a TraceFile. A forked child writes nothing. If the disk fails or is full, one
    error is logged, the trace ends, and `close` raises OSError. A call after `close` raises ValueError; the engine logs
    it.

    Raises OSError if the file cannot be written, ConfigError if another TraceFile has it open.
    """

    def __init__(self, path: str | os.PathLike[str], *, seconds_between_flushes: float = 1.0) -> None:
        if not seconds_between_flushes >= 0:        # NaN is not
            raise ConfigError(f"seconds_between_flushes is {seconds_between_flushes}", "expected 0 or more seconds")
        self._lines = _LineFile(os.fspath(path))
        self._append = self._lines.append
        self._seconds = seconds_between_flushes
        self._flush_at = time.monotonic() + seconds_between_flushes
        # The finalizer writes the last lines of an unclosed file. It must not refer to self.
        self._at_exit = weakref.finalize(self, self._lines.close_quietly)

    def __call__(self, iteration: IterationTrace) -> None:
        self._append(orjson.dumps(iteration, option=orjson.OPT_APPEND_NEWLINE))
        now = time.monotonic()
        if now >= self._flush_at:
            self._flush_at = now + self._seconds
            self._lines.flush()

    def close(self) -> None:
        """Write the buffered lines and close the file. A second call does nothing.

        Raises OSError if an iteration could not be written.
        """
        if self._at_exit.detach() is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LineFile:
    """A locked file with its own buffer. A forked child drops the content of the buffer.

    With a buffered Python file, the parent and the child would both write the buffer.
    """

    def __init__(self, path: str) -> None:
        self._path, self._process_id = path, os.getpid()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))      # new memory for each line would cost more than its copy
        self._used = 0
        self._is_closed = False
        self._failure: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.ftruncate(self._descriptor, 0)
            self._write(_HEADER)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another TraceFile", "expected a file for each trace",
                              "close the other one, or name another file") from None
        except OSError:        # a file system without locks
            pass

    def append(self, line: bytes) -> None:
        if self._is_closed:
            raise ValueError(f"{self._path} is closed; expected no iteration after `close`")
        end = self._used + len(line)
        if end > BUFFER_BYTES:
            self.flush()
            end = len(line)
            if end > BUFFER_BYTES:
                self._write_or_stop(line)
                return
        self._buffer[self._used:end] = line
        self._used = end

    def flush(self) -> None:
        self._write_or_stop(self._buffer[:self._used])
        self._used = 0

    def _write_or_stop(self, content: bytes | memoryview) -> None:
        if self._failure is not None or os.getpid() != self._process_id:
            return
        try:
            self._write(content)
        except OSError as error:        # no retry: the file would have a gap
            self._failure = error
            log.error("the trace is incomplete: %s cannot be written: %s; no further iteration is recorded",
                      self._path, error.strerror)

    def close(self) -> None:
        try:
            self.flush()
            if os.getpid() == self._process_id:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)        # a forked child may have the descriptor open
        finally:
            self._is_closed = True          # another file may get the number of the descriptor
            os.close(self._descriptor)
        if self._failure is not None:
            raise self._failure

    def close_quietly(self) -> None:
        with suppress(OSError):        # the error is in the log
            self.close()

    def _write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while view:
            try:
                view = view[os.write(self._descriptor, view):]
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._path) from None


def write_trace(iterations: Iterable[IterationTrace], file: IO[bytes]) -> None:
    """Write iterations to a binary file in the format of `TraceFile`."""
    write = TraceWriter(file)
    for iteration in iterations:
        write(iteration)


def read_trace(file: IO[bytes]) -> Iterator[IterationTrace]:
    """Yield the iterations of a trace. A last line that a crash cut off is left out.

    Raises ValueError if a `TraceFile` cannot have written the file. The message names the line, and the field if one is
    wrong.
    """
    _check_header(file.readline())
    before: IterationTrace | None = None
    for number, line in enumerate(file, 2):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not line.endswith(b"\n"):
                return
            raise ValueError(f"line {number} is not JSON; expected one object per line; the trace is damaged") from None
        try:
            iteration = _iteration(record)
            if before is not None:
                _check_order(before, iteration)
        except _FieldError as error:
            raise ValueError(f"line {number}: {error}") from None
        before = iteration
        yield iteration


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


class _FieldError(Exception):
    """A record of a trace has a missing or a wrong field."""


def _refuse(fact: str, expectation: str, fix: str = "the trace is damaged") -> NoReturn:
    raise _FieldError(f"{fact}; expected {expectation}; {fix}")


def _iteration(record: Any) -> IterationTrace:
    if type(record) is not dict:
        _refuse(f"the record is of type {type(record).__name__}", "a JSON object")
    if "format" in record:
        _refuse("a second trace begins here", "one trace per file", "split the file at this line")
    if missing := REQUIRED - record.keys():
        _refuse(f"the record has no {', '.join(sorted(missing))}", f"the fields {', '.join(sorted(REQUIRED))}")
    return IterationTrace(
        iteration=_count("iteration", record["iteration"]),
        context=_chunks(record["context"]),
        generation=_ids("generation", record["generation"]),
        paused=_ids("paused", record["paused"]),
        finished=_ids("finished", record["finished"]),
        arrived=_ids("arrived", record["arrived"]),
        started_at_s=_seconds(record["started_at_s"]),
        phases_us={phase: _count(f"phases_us.{phase}", time) for phase, time in _items("phases_us", record)},
        waiting={reason: _ids(f"waiting.{reason}", ids) for reason, ids in _items("waiting", record)},
        queued_requests=_count("queued_requests", record["queued_requests"]),
        live_blocks=_count("live_blocks", record["live_blocks"]),
        cached_blocks=_count("cached_blocks", record["cached_blocks"]),
        free_blocks=_count("free_blocks", record["free_blocks"]),
        end_reasons={reason: _ids(f"end_reasons.{reason}", ids) for reason, ids in _items("end_reasons", record)},
        arrived_at_s=_times(record, "arrived"),
        finished_at_s=_times(record, "finished"),
        room=_room(record.get("room")),
        settings={name: _setting(name, value) for name, value in _items("settings", record)},
        form=_word("form", record.get("form", "")),
        obstacles={name: _word(f"obstacles.{name}", word) for name, word in _items("obstacles", record)},
    )


def _check_order(before: IterationTrace, iteration: IterationTrace) -> None:
    if iteration.iteration <= before.iteration:
        _refuse(f"iteration {iteration.iteration} follows iteration {before.iteration}", "rising numbers",
                "the lines are out of order, or a second run begins here: split the file at this line")
    if iteration.started_at_s < before.started_at_s:
        _refuse(f"started_at_s is {iteration.started_at_s}, less than {before.started_at_s} in the previous record",
                "times that never fall")


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        _refuse(f"{name} is {_quoted(value)}", f"an integer from 0 to {LARGEST_COUNT}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        _refuse(f"started_at_s is {_quoted(value)}", "a finite number")
    return float(value)


def _times(record: dict[str, Any], of: str) -> tuple[float, ...]:
    times = record.get(f"{of}_at_s", [])
    if type(times) is not list or not all(type(time) in (int, float) and isfinite(time) for time in times) or (
            len(times) not in (0, len(record[of]))):
        _refuse(f"{of}_at_s is {_quoted(times)}", f"a finite number for each id of {of}")
    return tuple(map(float, times))


def _room(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not -1 <= value <= LARGEST_COUNT):
        _refuse(f"room is {_quoted(value)}", f"null, or an integer from -1 to {LARGEST_COUNT}")
    return value


def _setting(name: str, value: Any) -> int | str:
    if not isinstance(value, int | str):
        _refuse(f"settings.{name} is {_quoted(value)}", "an integer, a boolean or a string")
    return value


def _word(name: str, value: Any) -> str:
    if type(value) is not str:
        _refuse(f"{name} is {_quoted(value)}", "a string")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not list or value and (set(map(type, value)) != {int} or min(value) < 0):
        _refuse(f"{name} is {_quoted(value)}", f"a list of request ids, integers from 0 to {LARGEST_ID}")
    return tuple(value)


def _chunks(value: Any) -> tuple[tuple[int, int, int], ...]:
    if type(value) is not list:
        _refuse(f"context is {_quoted(value)}", "a list of [request id, first position, tokens]")
    for chunk in value:
        if type(chunk) is not list or len(chunk) != 3 or set(map(type, chunk)) != {int} or min(chunk) < 0 or max(
                chunk[1:]) > LARGEST_COUNT:
            _refuse(f"context has {_quoted(chunk)}", "[request id, first position, tokens], integers of 0 or more")
    return tuple(map(tuple, value))


def _items(name: str, record: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    value = record.get(name, {})
    if type(value) is not dict:
        _refuse(f"{name} is {_quoted(value)}", "a JSON object")
    return value.items()


def _quoted(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
