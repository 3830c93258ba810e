"""Select the requests of a file for a replay, limit their lengths, and set their arrival times."""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from ...errors import counted, printable
from ..shared_options import DELAYS, LONGER
from ..traffic import PREFIX_TOKENS
from .errors import LONGEST_QUOTE, DatasetError, quoted
from .records import MOST_SECONDS, Record, RecordReader

MOST_NAMED = 12            # fields in a note
STREAM_OF_DELAYS = 1    # id of a random stream; the prompts use other streams


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a file to replay. The constructor raises DatasetError for invalid values.

    time_scale          factor of the recorded times: 0.5 is twice as fast as recorded
    first               number of requests to skip at the beginning
    count               largest number of requests to take; None: all. Each turn of a session is a request
    turns               most turns of a session to take; None: all; 1: requests without sessions
    max_input_tokens    most tokens of a prompt, of which a turn's are those of the earlier turns and their answers
                        too; None: no limit. A truncated prompt keeps its beginning, so truncation
                        raises the share of prompt tokens that are in common prefixes
    max_output_tokens   most tokens of an output; None: no limit
    longer              "clip": truncate prompts and outputs above the limits; "drop": leave the request out, without
                        counting it towards `count`
    sort                True: sort a trace by arrival, which holds all requests in memory; False: refuse a trace with
                        decreasing times. JSON files are always read as a whole and sorted
    request_rate        requests/s, which replaces the recorded times; 0: all at once; None: as recorded, or all at once
                        if the file has no times
    delays              times between requests at `request_rate`: "exponential" (a Poisson process) or "constant"
    seed                seed of the delays and of random prompts
    """

    time_scale: float = 1.0
    first: int = 0
    count: int | None = None
    turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    longer: str = "clip"
    sort: bool = False
    request_rate: float | None = None
    delays: str = "exponential"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("first", 0), ("count", 1), ("turns", 1), ("max_input_tokens", 1),
                              ("max_output_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name in ("first", "seed")) or (value or 0) < 0 or (
                    value == 0 and minimum):
                raise _invalid(name, value, f"an integer of at least {minimum}")
        for name, values in (("longer", LONGER), ("delays", DELAYS)):
            if getattr(self, name) not in values:
                raise _invalid(name, getattr(self, name), " or ".join(values))
        if not _is_number(self.time_scale) or self.time_scale <= 0:
            raise _invalid("time_scale", self.time_scale, "more than 0; 0.5 is twice as fast as recorded")
        if self.request_rate is not None:
            if not _is_number(self.request_rate) or self.request_rate < 0:
                raise _invalid("request_rate", self.request_rate, "0 or more requests/s; 0 is all at once")
            if self.time_scale != 1:
                raise DatasetError("", "--time-scale and --request-rate were both given",
                                   "--request-rate replaces the recorded times, which --time-scale scales",
                                   "leave out one of the two options")

    def keeps_all(self) -> bool:
        """Return whether the selection takes every request unchanged."""
        return self == Selection(longer=self.longer, sort=self.sort, delays=self.delays, seed=self.seed)


@dataclass(slots=True)
class ReadReport:
    """Counts of a file's requests: kept, left out and truncated. Complete after the last request.

    kept      requests that were selected
    empty     requests left out because the prompt or the output has no tokens, such as failed requests of a trace
    dropped   requests left out because they are longer than the limits
    later_turns   turns left out because of `turns`, or because an earlier turn of their session was left out
    sessions  sessions of the kept requests
    bounds_no_turns   whether `turns` has no effect, because the file has no sessions
    unread    fields of the records that have no effect -> number of records with the field
    clipped_inputs, clipped_outputs   requests with a truncated prompt; requests with a truncated output
    """

    format: str = ""
    kept: int = 0
    empty: int = 0
    dropped: int = 0
    later_turns: int = 0
    sessions: int = 0
    bounds_no_turns: bool = False
    clipped_inputs: int = 0
    clipped_outputs: int = 0
    unread: dict[str, int] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Return a note for each reason for which requests were left out or truncated, with the number of requests."""
        counts = ((self.empty, "left out: prompt or output without tokens"),
                  (self.dropped, "left out: longer than the limits"),
                  (self.later_turns, "left out: turns after the last one that is taken"),
                  (self.clipped_inputs, "with a prompt truncated to the limit"),
                  (self.clipped_outputs, "with an output truncated to the limit"))
        notes = [f"{count} request{'s' * (count != 1)} {text}" for count, text in counts if count]
        if self.bounds_no_turns:
            notes.append("--turns has no effect: no request is a turn of a session")
        if self.unread:
            named = ", ".join(printable(name)[:LONGEST_QUOTE] for name in list(self.unread)[:MOST_NAMED])
            more = f" and {len(self.unread) - MOST_NAMED} more" if len(self.unread) > MOST_NAMED else ""
            notes.append(f"fields that are not read and have no effect: {named}{more}")
        return notes


def select(reader: RecordReader, selection: Selection, report: ReadReport) -> Iterator[Record]:
    """Yield the selected records in the order of their times. Adds to the counts of the report.

    Times count from the first selected record and are never None.

    Raises DatasetError for an invalid record, for decreasing times, for a time above MOST_SECONDS, and if no record is
    left.
    """
    records: Iterator[Record] = iter(reader)
    if selection.sort or reader.is_whole:
        records = iter(sorted(records, key=lambda record: record.time_s or 0.0))
    else:
        records = _in_order(records, reader)
    time_of = _times(selection)
    at, sessions = -1, _Sessions(selection, report, time_of)
    report.unread = reader.unread
    for at, record in enumerate(records):
        if at < selection.first:
            sessions.end(record)
            continue
        if sessions.may_go_on(record) and _fits(record, selection, report, sessions.history(record)):
            report.kept += 1
            record.time_s = sessions.add(record)
            if record.time_s > MOST_SECONDS:
                raise DatasetError(reader.place(record.position), f"the request arrives at {record.time_s:g} s",
                                   f"expected at most {MOST_SECONDS:g} s", "lower --time-scale, or raise the rate")
            yield record
            if report.kept == selection.count:
                break
        else:
            sessions.end(record)
    report.bounds_no_turns = selection.turns is not None and not sessions.has_any
    if not report.kept:
        facts = [f"the file has {counted(at + 1, 'request')}",
                 *([f"--skip is {selection.first}"] if selection.first else []),
                 *report.notes()]
        raise DatasetError(reader.place(0).rpartition(":")[0], f"no request is left: {', '.join(facts)}",
                           "expected at least one", "change the selection, or use another file")


class _Sessions:
    """The sessions of the records so far."""

    def __init__(self, selection: Selection, report: ReadReport, time_of: Callable[[float | None], float]) -> None:
        self._most, self._report, self._time_of = selection.turns, report, time_of
        self._tokens: dict[int, int] = {}       # session -> tokens of its turns and their answers so far
        self._turns: dict[int, int] = {}
        self._times: dict[int, float] = {}      # session -> arrival
        self._ended: set[int] = set()
        self.has_any = False

    def may_go_on(self, record: Record) -> bool:
        """Return whether the record may be taken, as far as its session is concerned. Counts a turn that may not."""
        self.has_any = self.has_any or record.session is not None
        is_out = record.session in self._ended or (self._most and self._turns.get(record.session, 0) >= self._most)
        self._report.later_turns += bool(is_out)
        return not is_out

    def history(self, record: Record) -> int:
        """Return the tokens before those of the record in its prompt."""
        return self._tokens.get(record.session, 0) if record.session is not None else 0

    def end(self, record: Record) -> None:
        """Let no later record of the session be taken."""
        if record.session is not None:
            self._ended.add(record.session)

    def add(self, record: Record) -> float:
        """Add a record that is taken, and return its time. With at most one turn each, a record has no session."""
        session = record.session
        if session is None or self._most == 1:
            record.session = None
            if session is not None:
                self._turns[session] = 1
            return self._time_of(record.time_s)
        if session not in self._times:
            self._times[session] = self._time_of(record.time_s)
            self._report.sessions += 1
        self._turns[session] = self._turns.get(session, 0) + 1
        self._tokens[session] = self.history(record) + record.input_tokens + record.output_tokens
        return self._times[session]


def _in_order(records: Iterator[Record], reader: RecordReader) -> Iterator[Record]:
    latest = -math.inf
    for record in records:
        if record.time_s is not None:
            if record.time_s < latest:
                fact = f"the time is {latest - record.time_s:.6f} s before that of the previous request"
                raise DatasetError(reader.place(record.position), fact,
                                   "expected requests in the order of arrival",
                                   "pass --sort, which reads the whole file first")
            latest = record.time_s
        yield record


def _fits(record: Record, selection: Selection, report: ReadReport, history: int) -> bool:
    """Return whether to keep the record. Truncates a record above the limits if `selection.longer` is "clip".

    history   tokens before those of the record in its prompt, which are never truncated
    """
    if not record.input_tokens or not record.output_tokens:
        report.empty += 1
        return False
    most_input = record.input_tokens if selection.max_input_tokens is None else selection.max_input_tokens - history
    most_output = selection.max_output_tokens or record.output_tokens
    is_long = record.input_tokens > most_input, record.output_tokens > most_output
    if any(is_long) and (selection.longer == "drop" or most_input < 1):
        report.dropped += 1
        return False
    if is_long[0]:
        report.clipped_inputs += 1
        record.input_tokens = most_input
        record.prefix_ids = record.prefix_ids[:-(-most_input // PREFIX_TOKENS)]
        record.prompt = record.prompt and record.prompt[:most_input]
    if is_long[1]:
        report.clipped_outputs += 1
        record.output_tokens = most_output
    return True


def _times(selection: Selection) -> Callable[[float | None], float]:
    """Return a function from the recorded time of a record to its time in the replay.

    The function must be called once per record, in order.
    """
    start: float | None = None
    rate = selection.request_rate

    def recorded(time_s: float | None) -> float:
        nonlocal start
        if time_s is None:
            return 0.0
        if start is None:
            start = time_s
        return (time_s - start) * selection.time_scale

    if rate is None:
        return recorded
    times = arrival_times(rate, selection.delays, selection.seed) if rate else repeat(0.0)
    return lambda _: next(times)


def arrival_times(rate: float, delays: str, seed: int) -> Iterator[float]:
    """Yield the arrival times of requests in seconds, without end; the first is 0.

    rate     requests/s, more than 0
    delays   times between two requests: "exponential" (a Poisson process) or "constant"
    seed     seed of the exponential times
    """
    random, now = np.random.default_rng([seed, STREAM_OF_DELAYS]), 0.0
    while True:
        yield round(now, 6)
        now += random.exponential(1 / rate) if delays == "exponential" else 1 / rate


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _invalid(name: str, value: Any, expected: str) -> DatasetError:
    option = {"first": "skip", "count": "num-requests", "seed": "random-seed"}.get(name, name.replace("_", "-"))
    return DatasetError("", f"--{option} is {quoted(value)}", f"expected {expected}")


def selection_of(options: argparse.Namespace) -> Selection:
    """Return the Selection of the options. Raises DatasetError for invalid values."""
    return Selection(time_scale=options.time_scale, first=options.first, count=options.num_requests,
                     turns=options.turns,
                     max_input_tokens=options.max_input_tokens, max_output_tokens=options.max_output_tokens,
                     longer=options.longer, sort=options.sort, request_rate=options.request_rate,
                     delays=options.delays, seed=options.random_seed)
