"""CSV traces: Azure, BurstGPT, and a plain format."""

import csv
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...errors import counted
from .errors import FIX_LINE, DatasetError, quoted
from .records import MOST_TOKENS, Record, note_unread, seconds
from .source import NOT_CUT, Source

STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names of one format. A file may have more columns.

    has_clock   True: times are dates with a time of day; False: times are seconds
    """

    time: str
    input_tokens: str
    output_tokens: str
    has_clock: bool = False

    @property
    def names(self) -> tuple[str, str, str]:
        return self.time, self.input_tokens, self.output_tokens


AZURE = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", has_clock=True)
BURSTGPT = Columns("Timestamp", "Request tokens", "Response tokens")
PLAIN = Columns("arrival_s", "input_tokens", "output_tokens")


def header_of(line: str) -> list[str]:
    """Split the header line of a CSV file into column names."""
    return [name.strip() for name in _cells(line)]


class CsvRecords:
    """Reads one CSV file, which has a row for each request. Implements `RecordReader`."""

    is_whole = False

    def __init__(self, source: Source, columns: Columns) -> None:
        self.members: dict[str, Any] = {}
        self.unread: dict[str, int] = {}
        self._source = source
        self._columns = columns

    def place(self, position: int) -> str:
        return f"{self._source.name}:{position}"

    def __iter__(self) -> Iterator[Record]:
        lines = self._source.lines()
        number, line = next(lines, (1, ""))
        header = self._split(line, number)
        missing = [name for name in self._columns.names if header.count(name) != 1]
        if missing:
            found = ", ".join(header) or "nothing"
            raise DatasetError(self.place(number), f"the header has {quoted(found)}",
                               f"expected each of {', '.join(self._columns.names)} exactly once",
                               "add the header, or force another format with --format")
        at, inputs, outputs = map(header.index, self._columns.names)
        time_of = _clock() if self._columns.has_clock else _number
        width = len(header)
        note_unread(self.unread, header, self._columns.names)
        for index, (number, line) in enumerate(lines):
            row = line.split(",") if '"' not in line else self._split(line, number)
            if len(row) != width:
                raise DatasetError(self.place(number), f"the line has {counted(len(row), 'column')}",
                                   f"expected {width}, as in the header", f"{NOT_CUT}, or delete the line")
            yield Record(number, index, self._time(row[at], number, time_of),
                         self._tokens(row[inputs], number, self._columns.input_tokens),
                         self._tokens(row[outputs], number, self._columns.output_tokens))

    def _split(self, line: str, number: int) -> list[str]:
        try:
            return header_of(line)
        except csv.Error as error:
            raise DatasetError(self.place(number), f"the line cannot be parsed: {error}",
                               "expected CSV") from None

    def _tokens(self, text: str, number: int, column: str) -> int:
        text = text.strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= MOST_TOKENS):
            raise DatasetError(self.place(number), f"{column} is {quoted(text)}",
                               f"expected an integer, 0 to {MOST_TOKENS}", FIX_LINE)
        return int(text)

    def _time(self, text: str, number: int, time_of: Callable[[str], float]) -> float:
        try:
            time_s = time_of(text.strip())
        except ValueError:
            expected = "a time as in 2023-11-16 18:15:46.6805900" if self._columns.has_clock else "a number of seconds"
            raise DatasetError(self.place(number), f"{self._columns.time} is {quoted(text)}", f"expected {expected}",
                               FIX_LINE) from None
        # Times with a clock count from the first line and may be negative. `seconds` would refuse negative times.
        return time_s if self._columns.has_clock else seconds(time_s, self.place(number), self._columns.time)


def _cells(line: str) -> list[str]:
    return next(csv.reader([line], strict=True), [])


def _number(text: str) -> float:
    return float(text) if "_" not in text else math.nan


def _clock() -> Callable[[str], float]:
    """Return a function that converts a date with a time of day to seconds since the date passed in its first call.

    Differences are computed in whole nanoseconds.
    """
    first = None
    known: dict[str, int] = {}

    def seconds_of(text: str) -> float:
        nonlocal first
        match = STAMP.fullmatch(text)
        if match is None:
            raise ValueError
        whole, fraction, zone = match.groups()
        second = known.get(whole + (zone or ""))
        if second is None:
            moment = datetime.fromisoformat(whole + (zone or ""))
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
            second = int(moment.timestamp())
            known.clear()    # rows of the same second are adjacent
            known[whole + (zone or "")] = second
        now = second * NANOSECONDS + int((fraction or "").ljust(9, "0"))
        if first is None:
            first = now
        return (now - first) / NANOSECONDS

    return seconds_of
