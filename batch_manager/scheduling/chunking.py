"""How a token budget too small for all prompts is divided among them: functions on lengths.

    remaining            [n] context tokens still to compute of each request, in order
    unit                 tokens per block; a chunk that is not the last of its prompt is a multiple of it
    capacity             tokens there are for all chunks; None: no bound
    max_context_length   longest chunk; None: no bound

Each policy returns [n] chunk sizes, 0 for a request that has to wait. Source: TensorRT-LLM's MicroBatchScheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ..names import ContextChunkingPolicy


def first_come_first_served(remaining: Sequence[int], unit: int, capacity: int | None,
                            max_context_length: int | None) -> list[int]:
    """Each takes all it needs of what is left; a prompt that has to be cut is cut to whole blocks.

    A later, shorter prompt that fits whole may use a tail too small for an earlier one.
    """
    left = inf if capacity is None else capacity
    longest = inf if max_context_length is None else max_context_length
    chunks = []
    for wanted in remaining:
        chunk = min(wanted, left, longest)
        if chunk < wanted:
            chunk = chunk // unit * unit
        chunks.append(chunk)
        left -= chunk
    return chunks


def equal_progress(remaining: Sequence[int], unit: int, capacity: int | None,
                   max_context_length: int | None) -> list[int]:
    """Round after round each gets one more block, until nobody can take another.

    Whoever cannot is passed over: a later, shorter one may still take its last few tokens.
    """
    left = inf if capacity is None else capacity
    longest = inf if max_context_length is None else max_context_length
    chunks = [0] * len(remaining)
    moved = True
    while moved and left > 0:
        moved = False
        for place, wanted in enumerate(remaining):
            step = min(unit, wanted - chunks[place])
            if 0 < step <= left and chunks[place] + step <= longest:
                chunks[place] += step
                left -= step
                moved = True
    return chunks


def force_chunk(remaining: Sequence[int], unit: int, capacity: int | None, max_context_length: int | None) -> list[int]:
    """One block each, also when everything would fit whole."""
    assert max_context_length is None or max_context_length >= unit
    left = inf if capacity is None else capacity
    chunks = []
    for wanted in remaining:
        chunk = min(wanted, unit)
        if chunk > left:
            chunk = 0
        chunks.append(chunk)
        left -= chunk
    return chunks


def drafts_kept(chunks: Sequence[int], remaining: Sequence[int], drafts: Sequence[int], unit: int,
                capacity: int | None, max_context_length: int | None) -> list[int]:
    """Draft tokens that still fit behind each last chunk: to the end of its block and within the bounds."""
    left = (inf if capacity is None else capacity) - sum(chunks)
    kept = []
    for chunk, wanted, draft in zip(chunks, remaining, drafts, strict=True):
        if chunk == wanted and draft:
            space = min(-chunk % unit, left)
            if max_context_length is not None:
                space = min(space, max_context_length - chunk)
            draft = min(draft, space)
            left -= draft
        kept.append(draft)
    return kept


DIVISIONS: dict[ContextChunkingPolicy, Callable[..., list[int]]] = {
    ContextChunkingPolicy.FIRST_COME_FIRST_SERVED: first_come_first_served,
    ContextChunkingPolicy.EQUAL_PROGRESS: equal_progress,
}


@dataclass(frozen=True, slots=True)
class ContextChunking:
    """How contexts are cut.

    divide               one of the policies above, or a function like them
    unit                 tokens per block
    max_context_length   longest chunk; None: no bound
    """

    divide: Callable[[Sequence[int], int, int | None, int | None], list[int]]
    unit: int
    max_context_length: int | None = None
