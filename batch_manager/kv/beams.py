"""Beams: they share the blocks they have in common, and each writes to a last block of its own."""

from collections.abc import Sequence

import numpy as np

from ..handover import BlockCopy
from .block_pool import BlockPool


def copies_of_first_beam(table: np.ndarray, num_tokens: int) -> list[BlockCopy]:
    """What gives all beams the last block that was computed for the first one.

    table   [beams, blocks]
    """
    first, *others = table[:, -1].tolist()
    return [BlockCopy(first, block_id, num_tokens) for block_id in others if block_id != first]


def reorder(table: np.ndarray, parents: Sequence[int], tokens_in_last: int, pool: BlockPool) -> list[BlockCopy]:
    """Make beam b go on where beam parents[b] stands. Takes no block.

    table            [beams, blocks], changed in place
    tokens_in_last   tokens in the last blocks, which are private; 0 when they are full and can be shared

    A parent with several children keeps its last block for the first of them. The others get the last blocks of beams
    that nobody goes on with, of which there are as many, and a copy of the content.
    """
    before = table.copy()
    after = before[list(parents)]
    copies = []
    if tokens_in_last:
        left_over = [before[beam, -1] for beam in range(len(before)) if beam not in parents]
        for beam, parent in enumerate(parents):
            if parent in parents[:beam]:
                after[beam, -1] = left_over.pop()
                copies.append(BlockCopy(int(before[parent, -1]), int(after[beam, -1]), tokens_in_last))

    changed = (before != after).any(axis=0)
    for block_id in after[:, changed].ravel().tolist():
        pool.share(block_id)
    for row in before[:, changed].tolist():
        pool.give_back(row)
    table[:] = after
    return copies
