"""The padded shapes for which graphs are captured, and the choice of one for a step. Pure arithmetic.

A padding row costs as much as a real row in matrix products, and nothing elsewhere. The row counts of shapes are
therefore close together. A generation step has fewer padding rows than real rows. From 8 rows on it has at most
7 padding rows, and from 256 rows on at most 31.

In a step with contexts, the generation rows and the context tokens are padded. A few shapes suffice for two reasons.
Padding is free in a step so small that its products take longer to read their weights than to compute. Larger steps
have no graph, because they compute for longer than their launches take.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SMALL_ROWS = (1, 2, 4)
STEP, LARGE_STEP = 8, 32
LARGE_ROWS = 256                   # from here on, shapes are LARGE_STEP rows apart
MOST_ROWS = 512                    # for a step with a graph; larger steps compute for longer than their launches take

MIXED_ROWS = (8, 32, 64, 128, 256)                       # generation rows of steps with contexts
MIXED_TOKENS = (64, 128, 256, 512, 1024, 2048)           # context tokens of these steps
MOST_CONTEXTS = 32                                       # contexts of these steps
# Operations of the largest step with contexts that has a graph: a multiplication and an addition per weight and token.
# They take 3 ms at 400 TFLOP/s, measured on an H100 in bf16; launching the kernels of a layer takes about 0.1 ms.
MOST_OPERATIONS = 12 * 10**11
NO_SIZES: frozenset[tuple[int, int]] = frozenset()


class Shape(NamedTuple):
    """The padded shape of a step at fixed addresses.

    The shape determines the launches of the step, and the addresses and sizes of the step's arrays.

    rows             number of generation rows, padding included
    is_split         whether attention may split the keys of generating sequences and of contexts into parts
    samples          whether rows may sample at random; False: all rows are greedy
    context_tokens   number of context tokens, padding included
    contexts         number of contexts, padding included
    adapts           whether rows may have an adapter; such a step samples
    """

    rows: int
    is_split: bool
    samples: bool
    context_tokens: int = 0
    contexts: int = 0
    adapts: bool = False

    @property
    def num_tokens(self) -> int:
        return self.rows + self.context_tokens

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, padding included."""
        return self.rows + self.contexts


def graph_rows(most_rows: int) -> tuple[int, ...]:
    """Return the row counts for which graphs of generation steps are captured, in ascending order.

    The last count is the smallest that holds `most_rows` rows, or MOST_ROWS if `most_rows` is larger.
    """
    rows = [*SMALL_ROWS, *range(STEP, LARGE_ROWS, STEP), *range(LARGE_ROWS, MOST_ROWS + 1, LARGE_STEP)]
    return _up_to(rows, most_rows)


def mixed_sizes(most_rows: int, most_tokens: int, num_weights: int) -> frozenset[tuple[int, int]]:
    """Return the sizes (generation rows, context tokens) for which graphs of steps with contexts are captured.

    most_rows     largest number of generation rows in a step
    most_tokens   largest number of context tokens in a step
    num_weights   number of weights of the model, which determines the time per token
    """
    return frozenset((rows, tokens) for rows in _up_to(MIXED_ROWS, most_rows)
                     for tokens in _up_to(MIXED_TOKENS, most_tokens)
                     if 2 * num_weights * (rows + tokens) <= MOST_OPERATIONS)


def captured_shapes(num_slots: int, sizes: Iterable[tuple[int, int]], may_split: Callable[[int, int], bool],
                    adapts: bool = False) -> list[Shape]:
    """Return the shapes for which graphs are captured.

    num_slots   number of sequences in the largest step
    sizes       a result of `mixed_sizes`
    may_split   (generation rows, context tokens) -> whether attention may split keys into parts in such a step
    adapts      whether the model has adapters. Steps with one have graphs of their own, which sample, so that steps
                without one launch nothing for them
    """
    generation = [(Shape(rows, False, samples), may_split(rows, 0))
                  for rows in graph_rows(num_slots) for samples in (False, True)]
    mixed = [(mixed_shape(*size), may_split(*size)) for size in sizes]
    plain = [shape._replace(is_split=is_split) for shape, may_be_split in (*generation, *mixed)
             for is_split in (False, True)[: 1 + may_be_split]]
    return [*plain, *(shape._replace(adapts=True) for shape in plain if adapts and shape.samples)]


def largest_shapes(num_slots: int, sizes: Iterable[tuple[int, int]], adapts: bool = False) -> list[Shape]:
    """Return the shapes whose steps need the largest buffers; see `captured_shapes`."""
    generation = Shape(max(num_slots, graph_rows(num_slots)[-1]), True, True, adapts=adapts)
    return [generation, *(mixed_shape(*size)._replace(is_split=True, adapts=adapts) for size in sizes)]


def mixed_shape(rows: int, context_tokens: int) -> Shape:
    """Return the shape of a step with contexts of one of `mixed_sizes`, without split keys."""
    return Shape(rows, False, True, context_tokens, MOST_CONTEXTS)


def padded(count: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that is at least `count`, or None if all are smaller."""
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def padded_mixed(num_rows: int, num_tokens: int, sizes: frozenset[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the size (generation rows, context tokens) to which a step of num_rows and num_tokens is padded.

    Each number is padded to the next value of MIXED_ROWS or MIXED_TOKENS. Returns None if this size has no graph.

    sizes   the sizes with a graph, a result of `mixed_sizes`
    """
    size = padded(num_rows, MIXED_ROWS), padded(num_tokens, MIXED_TOKENS)
    return size if size in sizes else None


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the ascending `sizes` up to and including the first that is at least `most`."""
    return tuple(sizes[: bisect.bisect_left(sizes, most) + 1])
