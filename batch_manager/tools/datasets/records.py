"""One request as a file has it, and what all readers of files share."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import DatasetError, quoted

MOST_TOKENS = 2**31 - 1    # of a prompt or an output: a larger number is an error in the file
MOST_SECONDS = 1e10        # three hundred years


@dataclass(slots=True)
class Record:
    """One request of a file. Nothing here is shared with other records.

    position        what the reader's `place` takes
    number          of the record in the file, from 0
    time_s          seconds from a zero of the file's own; None: the file has no times
    input_tokens, output_tokens   0 where a trace says so: the request failed
    prefix_ids      of the prompt's blocks, as in `Arrival`
    prompt          the tokens, where the file has them
    own             the request as a workload file has it: it may have more keys than this package knows
    """

    position: int
    number: int
    time_s: float | None
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prompt: list[int] | None = None
    own: dict[str, Any] | None = None


class RecordReader(Protocol):
    """The records of one open file, once.

    is_whole   the file was read as a whole, so that its records may be in any order
    members    what the file says beside its records; complete after the last one
    """

    is_whole: bool
    members: dict[str, Any]

    def __iter__(self) -> Iterator[Record]:
        """Raises DatasetError at the first record that is wrong."""

    def place(self, position: int) -> str:
        """`FILE:LINE` of a record."""


def whole_number(value: Any, place: str, name: str, minimum: int) -> int:
    """The value, checked. Raises DatasetError."""
    if type(value) is not int or not minimum <= value <= MOST_TOKENS:
        raise DatasetError(place, f"{name} is {quoted(value)}", f"expected a whole number, {minimum} to {MOST_TOKENS}",
                           "correct the line, or leave it out")
    return value


def seconds(value: Any, place: str, name: str) -> float:
    """The value, checked. Raises DatasetError."""
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= MOST_SECONDS:
        raise DatasetError(place, f"{name} is {quoted(value)}", f"expected a number, 0 to {MOST_SECONDS:.0f}",
                           "correct the line, or leave it out")
    return float(value)


def tokens_of(value: Any, place: str, name: str, vocab_size: int | None) -> list[int]:
    """The token ids, checked. vocab_size: None where it is not known. Raises DatasetError."""
    if type(value) is not list or not value:
        raise DatasetError(place, f"{name} is {'empty' if value == [] else quoted(value)}",
                           "expected a list of at least one token id", "correct the record, or leave it out")
    kinds = set(map(type, value))
    if kinds != {int}:
        raise DatasetError(place, f"{name} holds a {', '.join(sorted(kind.__name__ for kind in kinds - {int}))}",
                           "expected whole numbers only", "correct the record, or leave it out")
    least, most = min(value), max(value)
    if least < 0 or most > MOST_TOKENS:
        raise DatasetError(place, f"{name} holds the token {least if least < 0 else most}",
                           f"expected 0 to {MOST_TOKENS}", "correct the record, or leave it out")
    if vocab_size is not None and most >= vocab_size:
        raise DatasetError(place, f"{name} holds the token {most}", f"the vocabulary has {vocab_size} tokens",
                           "use the model that the file was made for, or make the file again for this one")
    return value
