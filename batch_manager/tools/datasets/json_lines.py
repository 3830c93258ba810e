"""JSON lines: one object per line."""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from .errors import FIX_LINE, DatasetError, quoted
from .source import NOT_CUT, Source


def parsed_line(line: str, place: str) -> dict[str, Any]:
    """Parse the line as a JSON object. Raises DatasetError with the position `place`."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{place}:{error.colno}", f"the line is not JSON: {error.msg}",
                           "expected one object per line", f"{NOT_CUT}, or delete the line") from None
    if type(row) is not dict:
        raise DatasetError(place, f"the line is {quoted(row)}", "expected one object per line", FIX_LINE)
    return row


class JsonLines:
    """The objects of a file with one JSON object per line. Has the methods of JsonDocument that readers use."""

    def __init__(self, source: Source) -> None:
        self.members: dict[str, Any] = {}
        self._source = source

    def place(self, position: int) -> str:
        return f"{self._source.name}:{position}"

    def items(self, array_names: Iterable[str]) -> Iterator[tuple[int, Any]]:
        for number, line in self._source.lines():
            yield number, parsed_line(line, self.place(number))
