"""JSON lines: one object in each line."""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from .errors import DatasetError, quoted
from .source import NOT_CUT, Source


def parsed_line(line: str, place: str) -> dict[str, Any]:
    """The object that the line holds. Raises DatasetError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{place}:{error.colno}", f"the line is no JSON: {error.msg}", "expected one object a line",
                           f"{NOT_CUT}, or leave the line out") from None
    if type(row) is not dict:
        raise DatasetError(place, f"the line is {quoted(row)}", "expected one object a line",
                           "correct the line, or leave it out")
    return row


class JsonLines:
    """The objects of a file with one in each line: (position, object)."""

    def __init__(self, source: Source) -> None:
        self.members: dict[str, Any] = {}
        self._source = source

    def place(self, position: int) -> str:
        return f"{self._source.name}:{position}"

    def items(self, array_names: Iterable[str]) -> Iterator[tuple[int, Any]]:
        for number, line in self._source.lines():
            yield number, parsed_line(line, self.place(number))
