"""Traces in Mooncake's format: JSON lines with the ids of a prompt's blocks of 512 tokens."""

from collections.abc import Iterator
from typing import Any

from ..traffic import PREFIX_TOKENS
from .errors import FIX_LINE, DatasetError, quoted
from .json_lines import parsed_line
from .records import Record, note_unread, seconds, whole_number
from .source import Source

KEYS = ("timestamp", "input_length", "output_length")
KNOWN = (*KEYS, "hash_ids")
MILLISECONDS = 1000


class MooncakeRecords:
    """Reads the rows of one trace. Implements `RecordReader`.

    An id in `hash_ids` identifies a block of the prompt together with all blocks before it. The last block may have
    fewer tokens. Ids beyond the end of the prompt are ignored. If a prompt has fewer ids than blocks, the blocks
    without an id are not shared.
    """

    is_whole = False

    def __init__(self, source: Source) -> None:
        self.members: dict[str, Any] = {}
        self.unread: dict[str, int] = {}
        self._source = source

    def place(self, position: int) -> str:
        return f"{self._source.name}:{position}"

    def __iter__(self) -> Iterator[Record]:
        for index, (number, line) in enumerate(self._source.lines()):
            place = self.place(number)
            row = parsed_line(line, place)
            missing = [key for key in KEYS if key not in row]
            if missing:
                raise DatasetError(place, f"the line has no {', '.join(missing)}",
                                   f"expected {', '.join(KEYS)}", FIX_LINE)
            note_unread(self.unread, row, KNOWN)
            tokens = whole_number(row["input_length"], place, "input_length", 0)
            ids = row.get("hash_ids", [])
            if type(ids) is not list or not all(type(one) is int and one >= 0 for one in ids):
                wrong = f"is {quoted(ids)}" if type(ids) is not list else "contains " + next(
                    quoted(one) for one in ids if type(one) is not int or one < 0)
                raise DatasetError(place, f"hash_ids {wrong}", "expected a list of integers of at least 0",
                                   "correct the line, or delete hash_ids")
            yield Record(number, index, seconds(row["timestamp"], place, "timestamp") / MILLISECONDS, tokens,
                         whole_number(row["output_length"], place, "output_length", 0),
                         tuple(ids[:-(-tokens // PREFIX_TOKENS)]))
