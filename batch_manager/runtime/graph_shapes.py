"""Which padded shapes of plain generation steps have graphs, and which of them serves a step. Pure arithmetic.

A padding row costs as much of a matrix product as a real one and nothing else. So shapes lie close: no step has more
padding than rows, and from 8 rows on none has more than 7 rows of it, or 31 from 256 on.
"""

import bisect
from collections.abc import Sequence

SMALL_ROWS = (1, 2, 4)
STEP, LARGE_STEP = 8, 32
LARGE_ROWS = 256                   # from here on shapes are LARGE_STEP rows apart
MOST_ROWS = 512                    # of a step with a graph: above, launching takes less time than computing


def graph_rows(most_rows: int) -> tuple[int, ...]:
    """Rows of the shapes that have graphs, rising: enough for steps of up to `most_rows` rows, MOST_ROWS at most."""
    rows = [*SMALL_ROWS, *range(STEP, LARGE_ROWS, STEP), *range(LARGE_ROWS, MOST_ROWS + 1, LARGE_STEP)]
    return tuple(rows[: bisect.bisect_left(rows, most_rows) + 1])


def padded_rows(num_rows: int, rows: Sequence[int]) -> int | None:
    """The smallest of `rows`, which rise, that holds so many; None where none does."""
    place = bisect.bisect_left(rows, num_rows)
    return rows[place] if place < len(rows) else None
