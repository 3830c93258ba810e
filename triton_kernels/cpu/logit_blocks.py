"""Rows of logits in blocks of 64. What is largest lies in the blocks with the largest maxima: one vectorised pass finds
these, and a few blocks are looked at after it.
"""

import torch

BLOCK = 64
PLACES = torch.arange(BLOCK, dtype=torch.int64, device="cpu")     # in a block


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """[r, vocab] -> [r, blocks]; the last block may be shorter."""
    return _reduce_blocks(logits, torch.amax)


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    return _reduce_blocks(weights, torch.sum)


def _reduce_blocks(rows: torch.Tensor, reduce) -> torch.Tensor:
    whole = rows.shape[1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(reduce(rows[:, :whole].unflatten(1, (-1, BLOCK)), -1))
    if whole < rows.shape[1]:
        parts.append(reduce(rows[:, whole:], -1)[:, None])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def ids_of(blocks: torch.Tensor, vocab: int) -> torch.Tensor:
    """Token ids in `blocks` [n, m], [n, m * BLOCK]; past the vocabulary its last id is repeated."""
    return (blocks[:, :, None] * BLOCK + PLACES).flatten(1).clamp_(max=vocab - 1)


def largest(logits: torch.Tensor, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of the `count` largest logits of each row, descending. `blocks` are the rows' block maxima."""
    if 2 * count > blocks.shape[1]:
        return logits.topk(count, 1)
    best = blocks.topk(count, 1, sorted=False).indices
    ids = (best[:, :, None] * BLOCK + PLACES).flatten(1)
    outside = ids >= logits.shape[1]
    values = logits.gather(1, ids.clamp(max=logits.shape[1] - 1)).masked_fill_(outside, -torch.inf)
    values, order = values.topk(count, 1)
    return values, ids.gather(1, order)
