"""The shape of a step, which determines its time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...handover import ScheduledBatch
from ...stats.trace import IterationTrace


@dataclass(frozen=True, slots=True)
class StepShape:
    """The amounts of work in one step, or in several: an amount is then an array with an entry per step, or a number.

    context_requests      number of sequences with a context chunk
    context_tokens        number of tokens of these chunks
    context_attention     number of pairs (token of a chunk, token that it attends to); a token also attends to itself
    generation_requests   number of generating sequences
    cached_tokens         number of tokens in the KV cache that the generating sequences attend to, including the input
                          tokens of the step
    shared_tokens         number of cached tokens that repeat: if several generating sequences found the same prefix in
                          the cache, its tokens count once for each of these sequences but the first
    """

    context_requests: int = 0
    context_tokens: int = 0
    context_attention: int = 0
    generation_requests: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0


def shape_of_batch(batch: ScheduledBatch, found_tokens: np.ndarray) -> StepShape:
    """Return the shape of a backend's batch, which must have neither beams nor draft tokens.

    found_tokens   [slots] number of tokens that the sequence in each slot found in the cache when it started
    """
    tokens = attention = 0
    for work in batch.context:
        count = len(work.token_ids)
        tokens += count
        attention += pairs(work.start, count)
    generating = len(batch.generation)
    cached = int(batch.generation.kv_lengths.sum()) + generating if generating else 0
    return StepShape(len(batch.context), tokens, attention, generating, cached,
                     shared_tokens(found_tokens[batch.generation.slots]))


def shared_tokens(found: np.ndarray) -> int:
    """Return the field `shared_tokens` of a step's StepShape.

    If k sequences found the same prefix in the cache, its tokens count k - 1 times. Sequences that found the same
    number of tokens are assumed to have found the same prefix, because a trace has no token ids.

    found   [n] number of tokens that each generating sequence found in the cache
    """
    return int(found.sum() - np.unique(found).sum()) if found.any() else 0


def shapes_of_trace(iterations: Iterable[IterationTrace]) -> Iterator[tuple[IterationTrace, StepShape]]:
    """Yield each iteration of a trace with the shape of the step that it launched.

    A trace does not record the number of cached tokens of a generating request. This function computes it. The
    number starts at the end of the last context chunk, or at 0 if the prompt is not in the trace. Each generation
    step, including the current one, adds one token.
    """
    cached: dict[int, int] = {}
    found: dict[int, int] = {}
    for iteration in iterations:
        for request_id in iteration.paused:
            cached.pop(request_id, None)
            found.pop(request_id, None)
        tokens = attention = 0
        for request_id, start, count in iteration.context:
            tokens += count
            attention += pairs(start, count)
            cached[request_id] = start + count
            found.setdefault(request_id, start)
        total = 0
        for request_id in iteration.generation:
            total += cached.get(request_id, 0) + 1
            cached[request_id] = cached.get(request_id, 0) + 1
        shared = shared_tokens(np.array([found.get(request_id, 0) for request_id in iteration.generation], np.int64))
        yield iteration, StepShape(len(iteration.context), tokens, attention, len(iteration.generation), total, shared)
        for request_id in iteration.finished:
            cached.pop(request_id, None)
            found.pop(request_id, None)


def pairs(start: Any, count: Any) -> Any:
    """Return the number of pairs (token of a chunk, token that it attends to). Takes numbers, or arrays over chunks."""
    return count * start + count * (count + 1) // 2
