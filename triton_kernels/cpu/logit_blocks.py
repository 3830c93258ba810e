"""Finds the largest logits of rows. Each row is divided into blocks of 64 logits.

One vectorized pass computes the maximum of each block. The largest logits are in the few blocks with the largest
maxima, and only these blocks are searched.
"""

import numpy as np
import torch

BLOCK = 64
OFFSETS = torch.arange(BLOCK, dtype=torch.int64, device="cpu")     # offsets of the logits in a block


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each block of logits [r, vocab], as [r, blocks]. The last block can be shorter."""
    return _reduce_blocks(logits, torch.amax)


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block of weights [r, vocab], as [r, blocks]."""
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
    """Return the token ids [n, m * BLOCK] of the blocks with the indices `blocks` [n, m].

    Ids past the vocabulary are replaced with the last id of the vocabulary.
    """
    return (blocks[:, :, None] * BLOCK + OFFSETS).flatten(1).clamp_(max=vocab - 1)


def largest(logits: torch.Tensor, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, ids) of the `count` largest logits of each row, descending. `blocks` are the block maxima."""
    row, ids, values = np.arange(len(logits))[:, None], None, logits
    if 2 * count <= blocks.shape[1]:
        ids = (_places_of_largest(blocks.numpy(), count)[:, :, None] * BLOCK + OFFSETS.numpy()).reshape(len(logits), -1)
        there = torch.from_numpy(ids)
        values = logits.gather(1, there.clamp(max=logits.shape[1] - 1))
        values.masked_fill_(there >= logits.shape[1], -torch.inf)
    places = _places_of_largest(values.numpy(), count)
    values, order = torch.from_numpy(values.numpy()[row, places]).sort(dim=1, descending=True)
    places = places[row, order.numpy()]
    return values, torch.from_numpy(places if ids is None else ids[row, places])


def _places_of_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices [n, count] of the `count` largest of `values` [n, m] in each row, in any order."""
    return np.argpartition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count:]
