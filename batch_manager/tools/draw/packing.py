"""Encodes a timeline as bytes for an HTML page, which page/unpack.js reads.

The bytes are the base64 encoding of a zlib stream. The stream has the length of the header in four bytes (little
endian), the header, and the columns. The header is JSON, and has the name and the length of each column.

The numbers of a column are delta encoded from 0, then zigzag encoded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...), then
written as varints. A varint is groups of seven bits, lowest first. The eighth bit of a group is set if another group
follows.
"""

import base64
import zlib
from collections.abc import Iterable, Iterator

import orjson

from .timeline import Timeline

COMPRESSION = 6
LARGEST = 2**53 - 1              # larger integers are not exact in a browser


def pack(timeline: Timeline, about: dict) -> bytes:
    """Return the bytes of a timeline. `about` is added to the header.

    Raises ValueError for a number above 2^53 - 1 in absolute value.
    """
    columns = dict(_columns(timeline))
    header = orjson.dumps(about | {
        "kinds": [{"kind": kind, "reason": reason} for kind, reason in timeline.kinds],
        "phases": list(timeline.phases_us), "forms": list(timeline.forms),
        "settings": dict(timeline.settings), "has_before": timeline.has_before,
        "requests": ",".join(str(row.request_id) for row in timeline.rows),
        "columns": [[name, len(values)] for name, values in columns.items()]})
    packer = zlib.compressobj(COMPRESSION)
    parts = [packer.compress(len(header).to_bytes(4, "little") + header)]
    parts += [packer.compress(_encoded(name, values)) for name, values in columns.items()]
    return base64.b64encode(b"".join([*parts, packer.flush()]))


def _columns(timeline: Timeline) -> Iterator[tuple[str, list[int]]]:
    rows = timeline.rows
    spans = [list(timeline.spans(row)) for row in rows]
    begin_us = timeline.begin_us
    yield "iteration", timeline.numbers
    yield "begin_us", [*timeline.begin_us, timeline.end_us] if timeline.numbers else []
    yield from timeline.counters.items()
    for phase, values in timeline.phases_us.items():
        yield f"phase {phase}", values
    yield "row_spans", [len(each) for each in spans]
    yield "row_end", [row.end for row in rows]
    yield "row_late_us", [row.end_us - begin_us[row.end - 1] for row in rows]       # since the last iteration began
    yield "row_ended", [int(row.has_ended) for row in rows]
    yield "span_start", [start for each in spans for _, start, _ in each]
    yield "span_kind", [kind for each in spans for kind, _, _ in each]
    yield "span_late_us", [us - begin_us[start] for each in spans for _, start, us in each]    # since it began
    yield "chunk_first", [first for row in rows for first in row.chunks[::2]]
    yield "chunk_tokens", [tokens for row in rows for tokens in row.chunks[1::2]]


def _encoded(name: str, values: Iterable[int]) -> bytes:
    out = bytearray()
    before = 0
    for value in values:
        if not -LARGEST <= value <= LARGEST:
            raise ValueError(f"the trace has a {name} of {value}; expected at most {LARGEST} in absolute "
                             "value, so that a browser holds it exactly; the trace is damaged")
        difference, before = value - before, value
        folded = 2 * difference if difference >= 0 else -2 * difference - 1
        while folded > 127:
            out.append(folded & 127 | 128)
            folded >>= 7
        out.append(folded)
    return bytes(out)
