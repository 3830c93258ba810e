"""How a token budget too small for all prompts is divided among them: functions on lengths.

    remaining            [n] context tokens still to compute of each request, in order
    unit                 tokens per block; a chunk that is not the last of its prompt is a multiple of it
    capacity             tokens for all chunks together; None: no bound
    max_context_length   longest chunk; None: no bound
    credits              [n] tokens at the front of each context that the KV cache is expected to have; None: none

Each policy returns [n] chunk sizes, 0 for a request that has to wait. Source: TensorRT-LLM's MicroBatchScheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ..names import ContextChunkingPolicy


def first_come_first_served(remaining: Sequence[int], unit: int, capacity: int | None,
                            max_context_length: int | None, credits: Sequence[int] | None = None) -> list[int]:
    """Each request in turn takes all the tokens that it needs of those left; a prompt that must be cut is cut to whole
    blocks.

    A later, shorter prompt that fits whole may use a remainder that is too small for an earlier one. A chunk that is
    cut begins after the cached tokens.
    """
    left = inf if capacity is None else capacity
    longest = inf if max_context_length is None else max_context_length
    chunks = []
    for wanted, credit in zip(remaining, _none(remaining) if credits is None else credits, strict=True):
        chunk = wanted
        if cost_after_credit(wanted, wanted, credit) > min(left, longest):
            chunk = int(min(left, longest)) // unit * unit
        chunks.append(chunk)
        left -= cost_after_credit(chunk, wanted, credit)
    return chunks


def equal_progress(remaining: Sequence[int], unit: int, capacity: int | None,
                   max_context_length: int | None, credits: Sequence[int] | None = None) -> list[int]:
    """In each round every request gets one more block, until none can take another.

    A request that cannot is skipped: a later, shorter one may still take its last few tokens. A chunk begins at the
    front, and its cached tokens cost nothing. If the rounds end before the first request has reached a token that it
    must compute, they start again after the cached tokens of each request, which then do not count against the longest
    chunk.
    """
    credits = _none(remaining) if credits is None else credits
    chunks = _rounds([0] * len(remaining), remaining, unit, capacity, [max_context_length] * len(remaining), credits)
    if capacity != 0 and remaining and 0 < credits[0] >= chunks[0] < remaining[0]:
        starts = [min(credit // unit * unit, wanted) for wanted, credit in zip(remaining, credits, strict=True)]
        longest = [None if max_context_length is None else max_context_length + credit for credit in credits]
        chunks = _rounds(starts, remaining, unit, capacity, longest, credits)
    return chunks


def _rounds(chunks: list[int], remaining: Sequence[int], unit: int, capacity: int | None,
            longest: Sequence[int | None], credits: Sequence[int]) -> list[int]:
    left = inf if capacity is None else capacity
    moved = True
    while moved and left > 0:
        moved = False
        for index, wanted in enumerate(remaining):
            step, credit = min(unit, wanted - chunks[index]), credits[index]
            bound = longest[index]
            if step <= 0 or bound is not None and chunks[index] + step > bound:
                continue
            cost = cost_with_credit(chunks[index] + step, wanted, credit) - cost_with_credit(
                chunks[index], wanted, credit)
            if cost <= left:
                chunks[index] += step
                left -= cost
                moved = True
    return chunks


def force_chunk(remaining: Sequence[int], unit: int, capacity: int | None, max_context_length: int | None,
                credits: Sequence[int] | None = None) -> list[int]:
    """One block for each request, even when all prompts would fit whole. It begins after the cached tokens."""
    assert max_context_length is None or max_context_length >= unit
    left = inf if capacity is None else capacity
    chunks = []
    for wanted, credit in zip(remaining, _none(remaining) if credits is None else credits, strict=True):
        chunk = wanted if wanted - credit <= unit else unit
        cost = cost_after_credit(chunk, wanted, credit)
        if cost > left:
            chunk = cost = 0
        chunks.append(chunk)
        left -= cost
    return chunks


def cost_after_credit(chunk: int, remaining: int, credit: int) -> int:
    """Tokens that a chunk computes which begins after the cached tokens."""
    return min(chunk, max(remaining - credit, 0))


def cost_with_credit(chunk: int, remaining: int, credit: int) -> int:
    """Tokens that a chunk computes which begins at the front."""
    return max(chunk - credit, 0)


def chunk_after_reuse(planned: int, reused: int, prompt_len: int, unit: int) -> int:
    """Tokens of a first chunk once the number of cached ones is known: it begins after them, and ends with a block
    unless it is the last chunk.
    """
    end = min(reused + planned, prompt_len)
    return (end if end == prompt_len else end // unit * unit) - reused


def drafts_kept(chunks: Sequence[int], remaining: Sequence[int], drafts: Sequence[int], unit: int,
                capacity: int | None, max_context_length: int | None, used: int | None = None) -> list[int]:
    """Draft tokens that still fit after each last chunk: to the end of its block and within the bounds.

    used   tokens of the capacity that the chunks cost; None: the sum of their lengths
    """
    left = (inf if capacity is None else capacity) - (sum(chunks) if used is None else used)
    kept = []
    for chunk, wanted, draft in zip(chunks, remaining, drafts, strict=True):
        if chunk == wanted and draft:
            space = int(min(-chunk % unit, left))
            if max_context_length is not None:
                space = min(space, max(max_context_length - chunk, 0))
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

    divide: Callable[..., list[int]]
    unit: int
    max_context_length: int | None = None

    def cost(self, chunk: int, remaining: int, credit: int) -> int:
        """Tokens of the budget that a chunk of the policy uses."""
        return (cost_with_credit if self.divide is equal_progress else cost_after_credit)(chunk, remaining, credit)


def _none(remaining: Sequence[int]) -> list[int]:
    return [0] * len(remaining)
