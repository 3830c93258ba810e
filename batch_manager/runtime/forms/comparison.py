"""Helpers to compare a compiled or fused forward with the model's own forward, on one step, before the first request.

Tolerances are above the differences that rounding causes, and far below those of a wrong operation.
"""

import numpy as np
import torch

from ...attention.interface import PackedStep


def first_step(num_tokens: int, vocab_size: int, tokens_per_block: int) -> PackedStep:
    """Return a step of contexts with `num_tokens` tokens in total, all in block 0.

    There is one context if the tokens fit into a block. Otherwise each context but the last has one token less
    than a block. Tokens whose indices in the step differ by the block size then have different positions. A kernel
    that takes a tile of rows from a wrong index therefore computes a different result.
    All contexts have the same tokens at the same positions, so that they write the same keys and values to the block.
    """
    length = num_tokens if num_tokens <= tokens_per_block else max(tokens_per_block - 1, 1)
    starts = np.array([*range(0, num_tokens, length), num_tokens], np.int32)
    positions, contexts = np.arange(num_tokens, dtype=np.int32) % length, len(starts) - 1
    return PackedStep(token_ids=positions % vocab_size, positions=positions, pool_slots=positions.astype(np.int64),
                      slots=np.zeros(contexts, np.int32), query_starts=starts,
                      kv_lengths=np.diff(starts), block_tables=np.zeros((contexts, 1), np.int32),
                      num_contexts=contexts, logits_rows=starts[1:].astype(np.int64) - 1)


def describe_difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """Return how far two tensors of the same shape differ, for a message; "" if they agree or `expected` is not finite.

    tolerance   the tensors agree if their largest difference is at most this share of the largest absolute expected
                value
    """
    found, expected = found.float(), expected.float()
    scale, difference = expected.abs().max().item(), (found - expected).abs().max().item()
    # If the model's own values are not finite, there is nothing to compare.
    if not expected.isfinite().all() or difference <= tolerance * max(scale, 1e-6):
        return ""
    return f"by {difference:.3g} where the largest value is {scale:.3g}"
