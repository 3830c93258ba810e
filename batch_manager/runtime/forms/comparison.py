"""Compares a form with the model's own layers on a first step, before the first request.

Tolerances are above the differences that rounding causes, and far below those of a wrong operation.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...attention.interface import Attention, PackedStep
from ...decoding.slots import Send
from ...errors import counted
from ...models.loading import LoadedModel

COMPARED_AT_ONCE = 16              # rows of results; more take too much memory


class Tolerance(NamedTuple):
    """How far results may differ that are the same up to rounding.

    share       of the largest absolute value: largest difference of two hidden states, or of two logits
    log_probs   largest difference of two log-probabilities of one token
    """

    share: float
    log_probs: float


TOLERANCES = {torch.float32: Tolerance(1e-3, 1e-4), torch.float16: Tolerance(0.02, 1e-2),
              torch.bfloat16: Tolerance(0.1, 5e-2)}
# With activations in 8 bits, the last bit of a number can change it by a hundredth. Found: up to 0.02 in float32 and
# 0.1 in bfloat16 (SmolLM2 135M, Gemma 3 270M).
SHARE_WITH_QUANTIZED_ACTIVATIONS = 0.3


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


def difference_from_layers(loaded: LoadedModel, attention: Attention, send: Send, step: PackedStep,
                           run: Callable[[torch.Tensor, torch.Tensor, Attention], torch.Tensor], *, gives_logits: bool
                           ) -> str:
    """Compute a step by the model's layers and by `run`. Return how the results differ; "": they agree.

    run            (embeddings of the tokens, positions, attention that has planned the step) -> hidden states of all
                   tokens, or logits. It may overwrite the embeddings
    gives_logits   whether `run` returns logits
    """
    model, planned = loaded.model, attention.plan(step) or []
    token_ids, positions, *tensors = send([step.token_ids.astype(np.int64), step.positions.astype(np.int64), *planned])
    if planned:
        attention.receive(tensors)
    hidden = model.embed(token_ids)
    expected = model.forward(hidden.clone(), positions, attention)
    if gives_logits:
        expected = model.logits(expected)
    found = run(hidden, positions, attention)
    share = SHARE_WITH_QUANTIZED_ACTIVATIONS if loaded.quantized_activations else TOLERANCES[loaded.dtype].share
    for found_rows, expected_rows in zip(found.split(COMPARED_AT_ONCE), expected.split(COMPARED_AT_ONCE)):
        if difference := describe_difference(found_rows, expected_rows, share):
            return f"differs from the layers: {difference}, in a first step of {counted(step.num_tokens, 'token')}"
    return ""


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
