"""Reads the timeline in an HTML page of `draw`, as page/unpack.js does; see tools/draw/packing.py."""

import base64
import json
import zlib
from collections.abc import Iterable, Iterator


def unpack(packed: bytes) -> tuple[dict, dict[str, list[int]]]:
    """Return the header, and a dictionary of column name -> values."""
    content = zlib.decompress(base64.b64decode(packed))
    begin = 4 + int.from_bytes(content[:4], "little")
    header = json.loads(content[4:begin])
    numbers = _numbers(content[begin:])
    return header, {name: _summed(next(numbers) for _ in range(count)) for name, count in header["columns"]}


def _numbers(content: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in content:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield -(value + 1 >> 1) if value & 1 else value >> 1
            value = shift = 0


def _summed(differences: Iterable[int]) -> list[int]:
    value, values = 0, []
    for difference in differences:
        value += difference
        values.append(value)
    return values
