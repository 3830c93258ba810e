"""What a claim of blocks gives the loop for its step."""

from dataclasses import dataclass

import numpy as np

from ..handover import BlockCopy, BlockTableUpdates


@dataclass(frozen=True, slots=True)
class Claim:
    """All that a step has to know of the blocks that were claimed for it.

    table_updates   changed entries of the block tables
    copies          blocks that the device copies before the step, in order
    slots           [g] int32, of the generating requests in the order of the claim
    kv_lengths      [g] int32, tokens in the KV cache before the step
    """

    table_updates: BlockTableUpdates
    copies: tuple[BlockCopy, ...]
    slots: np.ndarray
    kv_lengths: np.ndarray
