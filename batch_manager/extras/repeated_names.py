"""Find names that an object of a JSON text has twice. Parsers keep the last value, and the others have no effect."""

import json
import re
from typing import Any

from ..errors import printable
from ..option_values import unique_names

__all__ = ["repeated_name", "unique_names"]      # the second one is a hook for json.loads

LONGEST_NAME = 64
MOST_NAMES = 10_000      # of a text that is searched for the name; the names of a search take memory
SOME_NAME = "(a name)"
_NAME_STRING_OR_BRACE = re.compile(rb'("[^"]*")(\s*:)?|[{}]')


def repeated_name(text: bytes, parsed: Any) -> str | None:
    """Return a name that an object of a JSON text has twice, shortened and printable; None: there is none.

    In a text with more than MOST_NAMES colons, the name is SOME_NAME.

    The text has one colon after each name, and others are characters of its strings. If the parsed value has fewer, a
    value was left out. A hook for every object would take longer, and hold the interpreter lock for a long list.

    text     JSON in UTF-8
    parsed   its value
    """
    num_colons = text.count(b":")
    if b"\\u003" in text:                # colons of strings may be escaped
        unescaped = text.replace(b"\\\\", b"--")
        num_colons += unescaped.count(b"\\u003a") + unescaped.count(b"\\u003A")
    parts = [parsed]
    for part in parts:                   # grows
        kind = type(part)
        if kind is str:
            num_colons -= part.count(":")
        elif kind is dict:
            num_colons -= len(part)
            parts += part
            parts += part.values()
        elif kind is list:
            parts += part
    if not num_colons:
        return None
    return _first_repeated_name(text) if text.count(b":") <= MOST_NAMES else SOME_NAME


def _first_repeated_name(text: bytes) -> str | None:
    """Return the name. Reads brace by brace and string by string, so that other threads are not held up."""
    without_escapes = text.replace(b"\\\\", b"--").replace(b'\\"', b"--")     # every quote now begins or ends a string
    objects: list[set[str]] = []
    for found in _NAME_STRING_OR_BRACE.finditer(without_escapes):
        if found[0] == b"{":
            objects.append(set())
        elif found[0] == b"}":
            objects.pop()
        elif found[2] is not None:
            name = json.loads(text[slice(*found.span(1))])
            if name in objects[-1]:
                return printable(name[:LONGEST_NAME])
            objects[-1].add(name)
    return None
