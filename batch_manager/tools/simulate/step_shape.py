"""What the time of a step depends on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...handover import ScheduledBatch
from ...stats.trace import IterationTrace


@dataclass(frozen=True, slots=True)
class StepShape:
    """The amounts of work in one step.

    context_requests      sequences with a part of their prompt
    context_tokens        tokens of these parts
    context_attention     pairs of a token of these parts and a token that it attends to, itself included
    generation_requests   sequences that generate
    cached_tokens         tokens in the KV cache that these attend to, the input tokens of the step included
    shared_tokens         those of them that count more than once, because several of these sequences found the same
                          beginning in the cache: memory is read once for them
    """

    context_requests: int = 0
    context_tokens: int = 0
    context_attention: int = 0
    generation_requests: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0


def shape_of_batch(batch: ScheduledBatch, found_tokens: np.ndarray) -> StepShape:
    """Of what a backend is given. Without beams and draft tokens.

    found_tokens   [slots] tokens of each sequence that were found in the cache when it started
    """
    tokens = attention = 0
    for work in batch.context:
        count = len(work.token_ids)
        tokens += count
        attention += _pairs(work.start, count)
    generating = len(batch.generation)
    cached = int(batch.generation.kv_lengths.sum()) + generating if generating else 0
    return StepShape(len(batch.context), tokens, attention, generating, cached,
                     shared_tokens(found_tokens[batch.generation.slots]))


def shared_tokens(found: np.ndarray) -> int:
    """The amount of this name. Sequences that found as many tokens are taken to have found the same ones: a trace has
    no tokens.

    found   [n] tokens that each sequence found in the cache
    """
    return int(found.sum() - np.unique(found).sum()) if found.any() else 0


def shapes_of_trace(iterations: Iterable[IterationTrace]) -> Iterator[tuple[IterationTrace, StepShape]]:
    """Each iteration of a trace with the shape of the step that it launched.

    A trace does not say how many tokens of a generating request are cached. They are counted here, from the last part
    of its prompt on. A request whose prompt is not in the trace is counted from its first generated token.
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
            attention += _pairs(start, count)
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


def _pairs(start: int, count: int) -> int:
    return count * start + count * (count + 1) // 2
