"""Torch operations in pieces of fixed shape, so that the bits of a row depend on that row alone.

A library selects its code, and with it the order of a sum, by the shape of its input. Within one call, the code also
depends on whether an element is in the vectorized loop or in its tail, and on how threads share the work. Pieces of the
same shape use the same code. `in_pieces` splits the rows of an operation into pieces of a few fixed sizes and pads the
last piece. `agreeing_sizes` measures which sizes give the same bits on this machine with this number of threads.

    elementwise      pieces of ELEMENTS elements: no vectorized loop has a tail, and a single thread computes a piece
    row by row       pieces of about ELEMENTS elements, in whole rows
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

ELEMENTS = 8192              # a multiple of every vector width; torch uses several threads from 16,384 on
SMALL = 8                    # products of up to this many rows take the same time: that of reading the weights


def in_pieces(operation: Callable[..., torch.Tensor], *operands: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return operation(*operands), computed in pieces along the first dimension; the last piece is padded.

    Row i of the result must depend on row i of the operands only.

    sizes   sizes of pieces, ascending
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
    """Apply an elementwise function to x in pieces of ELEMENTS elements, and return the result."""
    return in_pieces(function, x.reshape(-1), sizes=(ELEMENTS,)).view(x.shape)


def row_by_row(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply a function to rows [n, size] in pieces of about ELEMENTS elements, and return the result.

    The function must compute each row of its result from the same row of its argument alone.
    """
    return in_pieces(function, rows, sizes=(max(1, ELEMENTS // rows.shape[1]),))


def agreeing_sizes(operation: Callable[..., torch.Tensor], *operands: torch.Tensor,
                   sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the members of `sizes` that give a result with the same bits as the largest size gives.

    A size is the number of rows of a piece. `sizes` and the returned sizes are ascending. The largest size is one
    of the returned sizes. Returns () if, with pieces of the largest size, the bits of a row depend on its index or
    on other rows.

    operands   operands with random values, whose number of rows is a multiple of the largest size
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
    """Return the size of the next piece when `left` rows remain."""
    holds_all = next((size for size in sizes if size >= left), None)
    if holds_all is not None and (holds_all <= SMALL or 4 * left > 3 * holds_all):
        return holds_all
    return next((size for size in reversed(sizes) if size <= left), sizes[0])
