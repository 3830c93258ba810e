"""Helpers to compare a compiled or fused forward with the model's own forward, on one step, before the first request.

Tolerances are above the differences that rounding causes, and far below those of a wrong operation.
"""

import numpy as np
import torch

from ..attention.interface import PackedStep


def first_step(num_tokens: int, vocab_size: int) -> PackedStep:
    """Return a step whose only request is a context of `num_tokens` tokens in block 0. The tokens must fit into it."""
    rows = np.arange(num_tokens, dtype=np.int32)
    return PackedStep(token_ids=rows % vocab_size, positions=rows, pool_slots=rows.astype(np.int64),
                      slots=np.zeros(1, np.int32), query_starts=np.array([0, num_tokens], np.int32),
                      kv_lengths=np.array([num_tokens], np.int32),
                      block_tables=np.zeros((1, 1), np.int32), num_contexts=1,
                      logits_rows=np.array([num_tokens - 1], np.int64))


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
