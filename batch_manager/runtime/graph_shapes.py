"""Which padded shapes of plain steps have graphs, and which of them serves a step. Pure arithmetic.

A padding row costs as much of a matrix product as a real one and nothing else. So shapes lie close: no generation step
has more padding than rows, and from 8 rows on none has more than 7 rows of it, or 31 from 256 on.

A step with contexts has two numbers to pad, its generation rows and its context tokens. Few shapes serve all: while a
product reads weights for longer than it computes, padding costs nothing, and steps so large that computing outlasts the
launches have no graph.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

SMALL_ROWS = (1, 2, 4)
STEP, LARGE_STEP = 8, 32
LARGE_ROWS = 256                   # from here on shapes are LARGE_STEP rows apart
MOST_ROWS = 512                    # of a step with a graph: above, launching takes less time than computing

MIXED_ROWS = (8, 32, 64, 128, 256)                       # generation rows of steps with contexts
MIXED_TOKENS = (64, 128, 256, 512, 1024, 2048)           # their context tokens
MOST_CONTEXTS = 32                                       # sequences that these belong to
# Of a step with contexts that has a graph: a multiplication and an addition for each weight and token. That is 3 ms at
# 400 TFLOP/s, what an H100 was measured to compute in bf16; launching the kernels of a layer takes about 0.1 ms.
MOST_OPERATIONS = 12 * 10**11


class StepShape(NamedTuple):
    """What the addresses, sizes and launches of a plain step follow from.

    rows             generation rows, padding included
    is_split         attention may cut generating sequences into parts
    samples          some tokens may be sampled; else each is that of a largest logit
    context_tokens   tokens of contexts, padding included
    contexts         sequences that these belong to, padding included
    """

    rows: int
    is_split: bool
    samples: bool
    context_tokens: int = 0
    contexts: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rows + self.context_tokens

    @property
    def num_draws(self) -> int:
        """Tokens that are drawn, at most."""
        return self.rows + self.contexts


def graph_rows(most_rows: int) -> tuple[int, ...]:
    """Rows of the generation steps that have graphs, rising: enough for up to `most_rows` rows, MOST_ROWS at most."""
    rows = [*SMALL_ROWS, *range(STEP, LARGE_ROWS, STEP), *range(LARGE_ROWS, MOST_ROWS + 1, LARGE_STEP)]
    return _up_to(rows, most_rows)


def mixed_sizes(most_rows: int, most_tokens: int, num_weights: int) -> frozenset[tuple[int, int]]:
    """(generation rows, context tokens) of the steps with contexts that have graphs.

    most_rows     of the largest step
    most_tokens   of the largest step
    num_weights   of the model: how much a token takes to compute
    """
    return frozenset((rows, tokens) for rows in _up_to(MIXED_ROWS, most_rows)
                     for tokens in _up_to(MIXED_TOKENS, most_tokens)
                     if 2 * num_weights * (rows + tokens) <= MOST_OPERATIONS)


def padded(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes`, which rise, that holds so many; None where none does."""
    place = bisect.bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def padded_mixed(num_rows: int, num_tokens: int, sizes: frozenset[tuple[int, int]]) -> tuple[int, int] | None:
    """The smallest of `sizes`, which `mixed_sizes` returned, that holds so many rows and context tokens, or None."""
    size = padded(num_rows, MIXED_ROWS), padded(num_tokens, MIXED_TOKENS)
    return size if size in sizes else None


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes below `most`, and the first that is not."""
    return tuple(sizes[: bisect.bisect_left(sizes, most) + 1])
