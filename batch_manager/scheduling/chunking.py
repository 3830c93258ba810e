"""Divides a token budget that is too small for all prompts. The policies are pure functions with these parameters:

    remaining            [n] context tokens of each request that are left to compute, in order
    unit                 tokens per block. Every chunk is a whole number of blocks, except the last chunk of a prompt
    capacity             tokens for all chunks together; None: no bound
    max_context_length   longest chunk, in tokens; None: no bound
    credits              [n] number of first tokens of each context that are expected to be cached; None: 0 for each

Each policy returns [n] chunk sizes in tokens, 0 for a request that has to wait. Source: TensorRT-LLM's
MicroBatchScheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ..names import ContextChunkingPolicy


def first_come_first_served(remaining: Sequence[int], unit: int, capacity: int | None,
                            max_context_length: int | None, credits: Sequence[int] | None = None) -> list[int]:
    """Serve requests in order: each takes all remaining tokens of its prompt, or as many whole blocks as fit.

    If the tokens left of `capacity` are too few for a block of an earlier prompt, a later, shorter prompt may use them.
    A chunk of all remaining tokens includes the cached tokens, which count neither towards `capacity` nor towards
    `max_context_length`. A shorter chunk begins after the cached tokens.
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
    """Give each request one more block per round, until no request can take another block.

    A round skips a request whose next block does not fit. A later request may still take a block, such as the short
    last block of its context. Cached tokens are part of a chunk, but do not use up `capacity`.

    If the chunk of the first request has cached tokens only and its context is longer, all rounds are run again,
    with two changes. Before the first round, each chunk already has all full cached blocks of its context. Cached
    tokens do not count towards max_context_length.
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
    """Give each request a chunk in which at most one block of tokens is computed, even if all prompts fit.

    The computed tokens come after the cached tokens of the request.
    """
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
    """Number of tokens that are computed for a chunk that begins after the cached tokens."""
    return min(chunk, max(remaining - credit, 0))


def cost_with_credit(chunk: int, remaining: int, credit: int) -> int:
    """Number of tokens that are computed for a chunk that includes cached tokens.

    The cached tokens are the first `credit` tokens of the context.
    """
    return max(chunk - credit, 0)


def chunk_after_reuse(planned: int, reused: int, prompt_len: int, unit: int) -> int:
    """Length of a first chunk, which was planned before the number of reused tokens was known.

    The chunk begins after the `reused` tokens and has at most `planned` tokens. It ends at a block boundary, unless it
    is the last chunk.
    """
    end = min(reused + planned, prompt_len)
    return (end if end == prompt_len else end // unit * unit) - reused


def drafts_kept(chunks: Sequence[int], remaining: Sequence[int], drafts: Sequence[int], unit: int,
                capacity: int | None, max_context_length: int | None, used: int | None = None) -> list[int]:
    """For each context, the number of draft tokens to keep.

    After the last chunk of a context, as many drafts are kept as fit into the last block of the chunk, into the token
    budget `capacity`, and into max_context_length. A context that has another chunk left keeps all drafts.

    used   tokens of `capacity` that the chunks use; None: the sum of their lengths
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
    """How to cut contexts into chunks.

    divide               a policy of this module, or a function with the same parameters
    unit                 tokens per block
    max_context_length   longest chunk; None: no bound
    """

    divide: Callable[..., list[int]]
    unit: int
    max_context_length: int | None = None

    def cost(self, chunk: int, remaining: int, credit: int) -> int:
        """Number of tokens of the budget that a chunk uses under the policy."""
        return (cost_with_credit if self.divide is equal_progress else cost_after_credit)(chunk, remaining, credit)


def _none(remaining: Sequence[int]) -> list[int]:
    return [0] * len(remaining)
