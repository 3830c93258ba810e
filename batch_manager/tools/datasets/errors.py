"""Errors in files of requests, with their position."""

from collections.abc import Iterable

from ...errors import printable

LONGEST_QUOTE = 60    # characters of a value in a message
FIX_LINE = "correct or delete the line"
FIX_RECORD = "correct or delete the record"


class DatasetError(ValueError):
    """A file or an option is invalid.

    The message has the position (`FILE:LINE: `), the fact, what is expected, and a fix if there is one.
    """

    def __init__(self, place: str, fact: str, expectation: str, way_out: str = "") -> None:
        text = "; ".join(filter(None, (fact, expectation, way_out)))
        super().__init__(f"{printable(place)}: {text}" if place else text)


def named_members(names: Iterable[str]) -> str:
    """Say which members a JSON object has, as a short text on one line."""
    joined = ", ".join(names)
    return f"the members {quoted(joined)}" if joined else "no members"


def quoted(value: object) -> str:
    """Format the value as a short text on one line."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"of type {type(value).__name__}"
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
