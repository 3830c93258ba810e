"""What is wrong with a file of requests, and where."""

from ...errors import printable

LONGEST_QUOTE = 60    # characters of a value in a message


class DatasetError(ValueError):
    """The file or the options cannot be used. The text says where (`FILE:LINE: `), the fact, what is expected, and what
    to do about it."""

    def __init__(self, place: str, fact: str, expectation: str, way_out: str) -> None:
        text = "; ".join((fact, expectation, way_out))
        super().__init__(f"{printable(place)}: {text}" if place else text)


def quoted(value: object) -> str:
    """The value as a short text on one line."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"of type {type(value).__name__}"
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
