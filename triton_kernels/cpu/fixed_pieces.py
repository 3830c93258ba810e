"""Operations of torch in pieces of fixed shape, so that a row's bits depend on that row alone.

A library chooses its code, and with it the order in which a sum is taken, by the shape it is given; and within one call
by where an element lies: in the vector loop or in its tail, in this thread's share or in that one's. A piece of one
shape is one code path. `in_pieces` cuts the rows of an operation into pieces of a few fixed sizes, the last one padded;
`agreeing_sizes` finds out, by computing, which sizes give the same bits on this machine with this number of threads.

    element-wise     pieces of ELEMENTS in a row: no vector loop has a tail in it, and no thread shares it with another
    row by row       pieces of as many rows as make up about ELEMENTS

Nothing here is an operation that a kernel has.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

ELEMENTS = 8192              # below what torch shares among threads (16,384 and more), a multiple of every vector loop
SMALL = 8                    # products of up to this many rows take the time of reading the weights, whatever they hold


def in_pieces(operation: Callable[..., torch.Tensor], *operands: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """operation(*operands), cut along the first dimension into pieces of `sizes`, ascending; the last is padded.

    Row i of the result belongs to row i of every operand.
    """
    operands = [operand.contiguous() for operand in operands]
    count = len(operands[0])
    if count in sizes:
        return operation(*operands)
    parts, start = [], 0
    while start < count:
        size = _next_size(count - start, sizes)
        pieces = [operand[start : start + size] for operand in operands]
        if start + size > count:
            missing = start + size - count
            pieces = [functional.pad(piece, [0, 0] * (piece.dim() - 1) + [0, missing]) for piece in pieces]
        parts.append(operation(*pieces))
        start += size
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) for a function of one element."""
    return in_pieces(function, x.reshape(-1), sizes=(ELEMENTS,)).view(x.shape)


def row_by_row(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """function(rows) for a function of one row; rows [n, size]."""
    return in_pieces(function, rows, sizes=(max(1, ELEMENTS // rows.shape[1]),))


def agreeing_sizes(operation: Callable[..., torch.Tensor], *operands: torch.Tensor,
                   sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of `sizes`, ascending, that give the bits of pieces of the largest one. Empty where not even that size
    gives a row the same bits at another place and beside other rows.

    operands   random, each of as many rows as the largest size or a multiple of it
    """
    largest = sizes[-1]
    expected = in_pieces(operation, *operands, sizes=(largest,))
    generator = torch.Generator("cpu").manual_seed(0)
    shuffled = torch.randperm(len(expected), generator=generator, dtype=torch.int64, device="cpu")
    for order in (torch.arange(len(expected), dtype=torch.int64, device="cpu").roll(1), shuffled):
        moved = in_pieces(operation, *(operand[order] for operand in operands), sizes=(largest,))
        if not torch.equal(moved, expected[order]):
            return ()
    return (*(size for size in sizes[:-1]
              if torch.equal(in_pieces(operation, *operands, sizes=(size,)), expected)), largest)


def _next_size(left: int, sizes: Sequence[int]) -> int:
    """The size of the next piece when `left` rows are left."""
    holds_all = next((size for size in sizes if size >= left), None)
    if holds_all is not None and (holds_all <= SMALL or 4 * left > 3 * holds_all):
        return holds_all
    return next((size for size in reversed(sizes) if size <= left), sizes[0])
