"""Read JSON objects of request bodies field by field. Unknown fields are refused by name, at every level."""

import re
from difflib import get_close_matches
from typing import Any

import orjson

from ...errors import type_name
from ..repeated_names import SOME_NAME, repeated_name
from .errors import OpenAIError, refused
from .unread_fields import is_unread

MOST_VALUES = 500_000      # orjson holds the interpreter lock: 0.1 us per value, 0.3 us per name, list or object
TWICE = "the name occurs twice in one object; expected it once"
VALUES_OF_A_LIST, VALUES_OF_A_NAME = 10, 3
_STRING_OR_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{,:]', re.DOTALL)
# Field of a body that one route reads and the other does not -> the field that the other reads.
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


class JsonObject:
    """The fields of a JSON object, without fields that are null.

    Reading a field removes it, so that only fields without a reader are left for `check_rest`.

    path   name of the object in errors: empty for the body, or such as `stream_options.`
    """

    def __init__(self, fields: dict[str, Any], path: str = "") -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._path = path
        self._read: set[str] = set()

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None, *,
             integers: str = "an integer of at most 64 bits") -> Any:
        """Remove and return a field.

        integers   description of the valid integers, for the message of an error
        """
        self._read.add(name)
        value = self._fields.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:
            if int in kinds and type(value) is float and not -(2**63) < value < 2**64:   # orjson's longer integers
                raise self.refused(name, f"got about {value:g}, which has more than 64 bits; expected {integers}")
            names = " or ".join(each.__name__ for each in kinds)
            raise self.refused(name, f"got {type_name(value)}; expected {names}")
        return value

    def object(self, name: str) -> "JsonObject | None":
        """Remove and return a field that is an object; None: it is missing."""
        fields = self.take(name, dict)
        return None if fields is None else JsonObject(fields, f"{self._path}{name}.")

    def refused(self, name: str, message: str) -> OpenAIError:
        return refused(f"{self._path}{name}", message)

    def number(self, name: str, default: float) -> float:
        return self.take(name, (int, float), default)

    def count(self, name: str, default: int | None, least: int = 0, most: int = 2**31 - 1) -> int | None:
        expected = f"an integer in {least}..{most}"
        value = self.take(name, int, default, integers=expected)
        if value is not None and not least <= value <= most:
            raise refused(name, f"got {value}; expected {expected}")
        return value

    def check_rest(self, is_chat: bool | None = None) -> None:
        """Refuse the remaining fields.

        is_chat   for a body: its fields that ask for what happens anyway pass. None: another object
        """
        for name, value in self._fields.items():
            if is_chat is None:
                raise self.refused(name[:64], f"unknown name; expected {', '.join(sorted(self._read))}")
            if not is_unread(name, value, is_chat):
                near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else get_close_matches(name[:64], self._read, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise OpenAIError(400, f"unrecognized request argument: {name[:64]!r}{hint}", name[:64],
                                  "unknown_parameter")


def parsed_json(body: bytes) -> dict[str, Any]:
    """Parse a body. Raises OpenAIError if it is not a JSON object, has too many values, or a name twice."""
    if len(body) > MOST_VALUES // VALUES_OF_A_LIST and _has_too_many_values(body):
        raise OpenAIError(413, f"the body has more than {MOST_VALUES:,} values; a list or an object counts as "
                               f"{VALUES_OF_A_LIST}, and a name in an object as {VALUES_OF_A_NAME}; expected fewer; "
                               "split it into several calls")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise OpenAIError(400, f"the body is not JSON from line {error.lineno} column {error.colno} on; expected a "
                          "JSON object") from None
    if not isinstance(fields, dict):
        raise OpenAIError(400, f"the body is JSON of type {type_name(fields)}; expected a JSON object")
    if (name := repeated_name(body, fields)) is not None:
        raise OpenAIError(400, f"{name}: {TWICE}", None if name == SOME_NAME else name)
    return fields


def _has_too_many_values(body: bytes) -> bool:
    weights = {b"[": VALUES_OF_A_LIST, b"{": VALUES_OF_A_LIST, b":": VALUES_OF_A_NAME, b",": 1}
    if sum(weight * body.count(mark) for mark, weight in weights.items()) <= MOST_VALUES:
        return False
    total = 0
    for found in _STRING_OR_MARK.finditer(body):     # the marks may be those of texts
        total += weights.get(found[0], 0)
        if total > MOST_VALUES:
            return True
    return False
