"""One request of a file, the interface of file readers, and shared checks."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import counted
from .errors import FIX_RECORD, DatasetError, quoted

MOST_TOKENS = 2**31 - 1    # of a prompt or an output; a larger number is refused
MOST_SECONDS = 1e10        # 300 years


@dataclass(slots=True)
class Record:
    """One request of a file. Its lists are not shared with other records.

    position        where the record is in the file, as a number that the reader's `place` converts to `FILE:LINE`
    number          index of the record in the file
    time_s          seconds, from an arbitrary zero; None: the file has no times
    input_tokens, output_tokens   numbers of tokens of prompt and output; 0 only for failed requests of a trace
    prefix_ids      one id for each PREFIX_TOKENS tokens of the prompt, as in `Arrival`; empty: the request has no ids
    prompt          tokens of the prompt; None: the file has no tokens
    session         number of the session of which the record is a turn; None: the record is no turn. The turns of a
                    session follow each other in their order. `input_tokens` and `prompt` are those of the new turn:
                    its whole prompt has the prompts and the answers of the earlier turns before them
    think_s         seconds from the answer to the previous turn to this turn; 0 in the first turn
    own             the JSON object of the request, unknown keys included; None: not a workload file
    """

    position: int
    number: int
    time_s: float | None
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prompt: list[int] | None = None
    session: int | None = None
    think_s: float = 0.0
    own: dict[str, Any] | None = None


class RecordReader(Protocol):
    """The records of one open file. They can be iterated over once.

    is_whole   whether the whole file is read before the first record is yielded. If so, the records in the file
               need not be in the order of their times
    members    members of a JSON document other than its requests; complete once the last record was yielded
    unread     fields of records that the reader does not know -> number of records with the field
    """

    is_whole: bool
    members: dict[str, Any]
    unread: dict[str, int]

    def __iter__(self) -> Iterator[Record]:
        """Yield the records. Raises DatasetError at the first invalid record."""

    def place(self, position: int) -> str:
        """Return `FILE:LINE` of a record."""


def note_unread(unread: dict[str, int], fields: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    """Count the fields of a record that are not `known`."""
    for field in fields:
        if field not in known:
            unread[prefix + field] = unread.get(prefix + field, 0) + 1


def whole_number(value: Any, place: str, name: str, minimum: int) -> int:
    """Return the value if it is an integer from `minimum` to MOST_TOKENS. Otherwise raises DatasetError."""
    if type(value) is not int or not minimum <= value <= MOST_TOKENS:
        raise DatasetError(place, f"{name} is {quoted(value)}", f"expected an integer, {minimum} to {MOST_TOKENS}",
                           FIX_RECORD)
    return value


def seconds(value: Any, place: str, name: str) -> float:
    """Return the value as a float if it is a number from 0 to MOST_SECONDS. Otherwise raises DatasetError."""
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= MOST_SECONDS:
        raise DatasetError(place, f"{name} is {quoted(value)}", f"expected a number, 0 to {MOST_SECONDS:.0f}",
                           FIX_RECORD)
    return float(value)


def tokens_of(value: Any, place: str, name: str, vocab_size: int | None) -> list[int]:
    """Return the value if it is a list of at least one valid token id. Otherwise raises DatasetError.

    vocab_size   token ids must be below this number; None: unknown
    """
    if type(value) is not list or not value:
        raise DatasetError(place, f"{name} is {'empty' if value == [] else quoted(value)}",
                           "expected a list of at least one token id", FIX_RECORD)
    kinds = set(map(type, value))
    if kinds != {int}:
        raise DatasetError(place, f"{name} contains a {', '.join(sorted(kind.__name__ for kind in kinds - {int}))}",
                           "expected integers only", FIX_RECORD)
    least, most = min(value), max(value)
    if least < 0 or most > MOST_TOKENS:
        raise DatasetError(place, f"{name} contains the token {least if least < 0 else most}",
                           f"expected 0 to {MOST_TOKENS}", FIX_RECORD)
    if vocab_size is not None and most >= vocab_size:
        raise DatasetError(place, f"{name} contains the token {most}",
                           f"the vocabulary has {counted(vocab_size, 'token')}",
                           "use the model that the file was made for, or create the file again for this model")
    return value
