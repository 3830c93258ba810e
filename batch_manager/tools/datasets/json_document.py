"""Read the long array of a JSON file item by item, with line numbers.

The whole text of the file is in memory. Only one parsed item at a time is in memory.
"""

import json
import re
from collections.abc import Collection, Generator, Iterator
from typing import Any

from .errors import DatasetError, named_members, quoted
from .source import NOT_CUT

BLANK = re.compile(r"[ \t\r\n]*")
COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\r\n]*|/\*.*?\*/', re.DOTALL)
NOT_BLANK = re.compile(r"[^\r\n]")
# Messages of Python's decoder that are not sentences.
EXPECTATIONS = {"Expecting value": "expected a value",
                "Expecting property name enclosed in double quotes": "expected the name of a member in double quotes"}


class JsonDocument:
    """The text of a JSON array, or of an object with an array as a member. Comments (`//`, `/* */`) are skipped.

    Methods raise DatasetError with line and column.

    members   members of the object other than the array; complete when the iterator of `items` is exhausted
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.members: dict[str, Any] = {}
        self._text = COMMENT.sub(_blank, text) if "//" in text or "/*" in text else text
        self._known = 0, 1    # a position and its line
        self._decoder = json.JSONDecoder(parse_constant=_refuse)

    def place(self, position: int) -> str:
        known, line = self._known if self._known[0] <= position else (0, 1)    # positions usually ascend
        self._known = position, line + self._text.count("\n", known, position)
        return f"{self.name}:{self._known[1]}"

    def items(self, array_names: Collection[str]) -> Iterator[tuple[int, Any]]:
        """Yield (position in the text, item) for each item of the array.

        array_names   permitted names of the array, if the document is an object; exactly one of them must be there
        """
        start = self._skip(0)
        if self._text.startswith("[", start):
            end = yield from self._array(start)
        elif self._text.startswith("{", start):
            end = yield from self._object(start, array_names)
        else:
            raise self._wrong(start, "expected an array or an object")
        if (end := self._skip(end)) != len(self._text):
            raise self._wrong(end, "expected the end of the file")

    def _object(self, start: int, array_names: Collection[str]) -> Generator[tuple[int, Any], None, int]:
        """Yield (position, item) for each item of the array in the object at `start`.

        Returns the position after the object.
        """
        at, found = self._skip(start + 1), False
        while not self._text.startswith("}", at):
            key_at = at
            key, at = self._value(at)
            if type(key) is not str:
                raise self._wrong(key_at, "expected the name of a member")
            at = self._skip(self._take(":", self._skip(at)))
            if key in array_names and self._text.startswith("[", at):
                if found:
                    raise self._wrong(key_at, f"expected only one array with the name {' or '.join(array_names)}")
                found = True
                at = yield from self._array(at)
            else:
                self.members[key], at = self._value(at)
            at = self._next(at, "}")
        if not found:
            raise DatasetError(self.place(start), f"the object has {named_members(self.members)}",
                               f"expected an array with the name {' or '.join(array_names)}",
                               "set another format with --format")
        return at + 1

    def _array(self, start: int) -> Generator[tuple[int, Any], None, int]:
        at = self._skip(start + 1)
        while not self._text.startswith("]", at):
            item_at = at
            item, at = self._value(at)
            yield item_at, item
            at = self._next(at, "]")
        return at + 1

    def _next(self, at: int, closing: str) -> int:
        """Return the position of the next item or closing bracket after the item that ends at `at`."""
        at = self._skip(at)
        if self._text.startswith(closing, at):
            return at
        after = self._skip(self._take(",", at))
        if self._text.startswith(closing, after):
            raise self._wrong(after, "expected an item after the comma")
        return after

    def _take(self, character: str, at: int) -> int:
        if not self._text.startswith(character, at):
            raise self._wrong(at, f"expected {character!r}")
        return at + 1

    def _skip(self, at: int) -> int:
        return BLANK.match(self._text, at).end()

    def _value(self, at: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self._text, at)
        except json.JSONDecodeError as error:
            raise self._wrong(error.pos, _expectation(error.msg)) from None
        except RecursionError:
            raise self._wrong(at, "expected fewer nested arrays and objects") from None
        except ValueError as error:       # NaN, or a number with thousands of digits
            raise self._wrong(at, f"expected valid JSON: {str(error)[:80]}") from None

    def _wrong(self, position: int, fact: str) -> DatasetError:
        column = position - (self._text.rfind("\n", 0, position) + 1) + 1
        place = f"{self.place(position)}:{column}"
        if position >= len(self._text.rstrip()):
            return DatasetError(place, "the file is truncated", fact, NOT_CUT)
        rest_of_line = self._text[position:position + 20].split("\n")[0]
        return DatasetError(place, f"the text is {quoted(rest_of_line)}" if rest_of_line else "the line ends", fact)


def _expectation(fault: str) -> str:
    """Return what Python's JSON decoder expected, given its message."""
    if fault.startswith("Expecting "):
        return EXPECTATIONS.get(fault, fault.replace("Expecting", "expected").removesuffix(" delimiter"))
    return f"expected valid JSON: {fault[:1].lower()}{fault[1:].removesuffix(' at').removesuffix(' starting')}"


def _blank(match: re.Match) -> str:
    text = match.group()
    return text if text.startswith('"') else NOT_BLANK.sub(" ", text)


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no value {constant}")
