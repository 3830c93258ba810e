"""Operations that change the pool, the tables and the prefix cache: start sequences, reorder beams, rewind tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np

from ..errors import InternalError, counted
from ..handover import BlockCopy, BlockTableUpdates
from ..requests.llm_request import LlmRequest
from .block_needs import blocks_of_prompt, ceil_div
from .block_pool import BlockPool, OutOfBlocksError
from .prefix_cache import PrefixCache
from .prefix_index import PrefixNode
from .retention import retain_prompt
from .sequence_table import Entries, SequenceTable
from .window import AttentionWindow


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of `KvCacheManager.claim`, from which the batch of the step is made.

    table_updates   changed entries of the block tables
    copies          copies of block contents to make before the step, in order
    slots           [g] int32, slots of the g generating requests in the order of the claim
    kv_lengths      [g] int32, number of tokens of these requests in the KV cache before the step
    """

    table_updates: BlockTableUpdates
    copies: tuple[BlockCopy, ...]
    slots: np.ndarray
    kv_lengths: np.ndarray


# First chunks.


def start(pool: BlockPool, sequences: SequenceTable, first_chunks: Sequence[LlmRequest],
          taken_elsewhere: int) -> list[Entries]:
    """Allocate blocks for the whole prompt of each request in `first_chunks`. Returns the new block table entries.

    Beams share all blocks but a partly filled last block.

    taken_elsewhere   number of blocks to leave free for the generating requests of the step

    Raises OutOfBlocksError, with nothing changed, if too few blocks are free.
    """
    unit = sequences.tokens_per_block
    counts = [blocks_of_prompt(request.prompt_len, unit, request.beam_width) for request in first_chunks]
    wanted = sum(counts)
    if wanted + taken_elsewhere > len(pool.free):
        raise OutOfBlocksError(wanted + taken_elsewhere, len(pool.free))
    taken = iter(pool.take(wanted))
    changed = []
    for request, count in zip(first_chunks, counts, strict=True):
        block_ids = list(islice(taken, count))
        private = request.beam_width if request.prompt_len % unit else 0
        for block_id in block_ids[:count - private] * (request.beam_width - 1):
            pool.share(block_id)
        changed.append(sequences.add(request, block_ids, _last_blocks(request, unit), private))
    return changed


def start_with_reuse(cache: PrefixCache, sequences: SequenceTable, first_chunks: Sequence[LlmRequest],
                     taken_elsewhere: int) -> list[Entries]:
    """Allocate blocks as `start` does, but reuse the cached blocks of the prompts.

    Sets `sequences.reused_tokens` to the number of cached tokens of each prompt. Beams do not share the last block of
    the prompt.
    """
    claim = PrefixClaim(cache, first_chunks, taken_elsewhere)
    if claim.needed > len(cache.pool.free):
        raise OutOfBlocksError(claim.needed, len(cache.pool.free))
    changed = []
    for request, begun in zip(first_chunks, claim.start(), strict=True):
        changed.append(sequences.add(request, begun.block_ids, _last_blocks(request, cache.tokens_per_block),
                                     request.beam_width))
        sequences.reused_tokens[request.seq_slot] = begun.reused_tokens
    return changed


def _last_blocks(request: LlmRequest, tokens_per_block: int) -> int:
    return ceil_div(request.prompt_len + request.max_new_tokens, tokens_per_block)


@dataclass(frozen=True, slots=True)
class Start:
    """The blocks of a new sequence.

    block_ids       in token order; with beams, the list ends with the last prompt block of each beam
    reused_tokens   cached tokens at the beginning of the sequence
    """

    block_ids: list[int]
    reused_tokens: int


class PrefixClaim:
    """Takes the blocks of several first chunks, with reuse of cached blocks.

    Before `start`, the caller checks that at least `needed` blocks are free.

    The claim protects all cached blocks that the chunks reuse before it takes the first new block. Taking new
    blocks therefore evicts none of these blocks.

    A cached block that is reused only in part may be copied to a new block. The cached block stays protected at
    least until the new block is taken.
    """

    def __init__(self, cache: PrefixCache, requests: Sequence[LlmRequest], taken_elsewhere: int) -> None:
        self._cache, self._pool = cache, cache.pool
        self._requests = requests
        self._found = [cache.shareable(request) for request in requests]
        self._unowned = {node for nodes in self._found for node in nodes if not cache.is_owned(node)}
        self._left = taken_elsewhere + sum(
            blocks_of_prompt(request.prompt_len, cache.tokens_per_block, request.beam_width, own_last=True) - len(nodes)
            for request, nodes in zip(requests, self._found, strict=True))
        self._pinned: list[int] = []

    @property
    def needed(self) -> int:
        """Number of free blocks that `start` takes, plus the blocks that it leaves free for the generating requests."""
        return self._left + len(self._unowned)

    def start(self) -> list[Start]:
        """Take the blocks of all requests and return one Start for each request, in order."""
        self._protect()
        starts = [self._start(request, nodes) for request, nodes in zip(self._requests, self._found, strict=True)]
        for host_id in self._pinned:
            self._cache.host.unpin(host_id)
        return starts

    def _protect(self) -> None:
        in_host = []
        for node in (node for nodes in self._found for node in nodes):
            if node.block_id is None:
                assert node.host_id is not None                # cached content is in one of the two pools
                self._cache.host.pin(node.host_id)
                in_host.append(node)
            else:
                self._pool.share(node.block_id)
        for node in in_host:
            if node.block_id is None:
                self._cache.bring_back(node)
            else:
                self._pool.share(node.block_id)

    def _start(self, request: LlmRequest, nodes: list[PrefixNode]) -> Start:
        unit, beams = self._cache.tokens_per_block, request.beam_width
        total = ceil_div(request.prompt_len, unit)
        block_ids = cast("list[int]", [node.block_id for node in nodes])    # `_protect` brought them into the pool
        reused_tokens = len(nodes) * unit

        if beams == 1 or len(nodes) < total - 1:
            node, num_tokens = self._cache.similar(request, nodes)
            block_id = None if node is None else self._partial_block(node, num_tokens)
            if block_id is not None:
                block_ids.append(block_id)
                reused_tokens += num_tokens
        found = len(block_ids)
        block_ids += self._take(total - 1 + beams - found)

        retain_prompt(self._pool, request, block_ids, found, unit)
        for block_id in block_ids[:total - 1] * (beams - 1):
            self._pool.share(block_id)
        self._cache.reused_blocks += found
        return Start(block_ids, reused_tokens)

    def _partial_block(self, node: PrefixNode, num_tokens: int) -> int | None:
        """Return a private block that begins with the first `num_tokens` tokens of the cached block of `node`.

        If the content is in a host block, it is copied. A cached block that a sequence holds is copied too. A
        cached block that no sequence holds is copied only if the cache has blocks that continue it and another
        block is free. Otherwise the block itself leaves the cache and is returned.
        """
        source = node.block_id
        if source is None:
            host_id = node.host_id
            assert host_id is not None                         # cached content is in one of the two pools
            self._cache.host.pin(host_id)
            self._pinned.append(host_id)
            (block_id,) = self._take(1)
            self._pool.set_priority(block_id, self._cache.host.priority(host_id))
            self._cache.copies.append(BlockCopy(host_id, block_id, num_tokens, from_host=True))
            return block_id
        if not self._cache.is_owned(node) and (not node.children or len(self._pool.free) == 1):
            self._left -= 1
            return self._cache.take_over(node)
        self._pool.share(source)
        (block_id,) = self._take(1)
        self._pool.set_priority(block_id, self._pool.priority(source))
        self._cache.copies.append(BlockCopy(source, block_id, num_tokens))
        self._pool.give_back([source])     # copies run in order, before the step writes to blocks taken later
        return block_id

    def _take(self, count: int) -> list[int]:
        self._left -= count
        return self._cache.take(count)


# Beams share their common blocks. Each beam writes to its own last block.


def copies_of_first_beam(table: np.ndarray, num_tokens: int) -> list[BlockCopy]:
    """Return the copies that give the last block of each beam the content of the first beam's last block.

    table        [beams, blocks], the block table of the sequence
    num_tokens   number of tokens in the last block
    """
    first, *others = table[:, -1].tolist()
    return [BlockCopy(first, block_id, num_tokens) for block_id in others if block_id != first]


def reorder(table: np.ndarray, parents: Sequence[int], tokens_in_last: int, pool: BlockPool) -> list[BlockCopy]:
    """Make beam b continue from beam parents[b]. Allocates no block. Returns the copies to make.

    table            [beams, blocks], changed in place
    tokens_in_last   number of tokens in each beam's last block, which is private; 0 if the last blocks are full and can
                     be shared

    The first child of a parent keeps the parent's last block. Each further child gets the last block of a beam without
    children, and a copy of the content of the parent's last block.
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


# Undo claims of tokens: rejected drafts and void rows.


def rewind(requests: Sequence[LlmRequest], num_tokens: int | Sequence[int], sequences: SequenceTable,
           pool: BlockPool, window: AttentionWindow, keeps_prompts: bool) -> None:
    """Remove the last tokens of sequences. The released blocks are the next to be allocated.

    num_tokens      tokens to remove: a number for each request, or one number for all
    keeps_prompts   refuse to shorten a prompt, because other requests may share its blocks

    Raises InternalError, with nothing changed, if a number of tokens is negative, if a request holds no blocks or
    occurs twice, or if a shortened sequence would be empty, would be shorter than its prompt with `keeps_prompts`, or
    would need blocks that were released because they left the window. With beams, also raises it if the new last block
    of a sequence would be partly filled and shared.
    """
    unit = sequences.tokens_per_block
    slots = sequences.find_slots(requests)
    counts = np.broadcast_to(np.asarray(num_tokens, np.int64), slots.shape)
    lengths = sequences.kv_lengths[slots] - counts
    ends = -(-lengths // unit)
    shortest = np.array([request.prompt_len for request in requests]) if keeps_prompts else 1

    def refuse(indices: np.ndarray, expected: str) -> None:
        for index in indices[:1].tolist():
            raise InternalError(f"{requests[index]} cannot be rewound by {counted(counts[index], 'token')}", expected)

    refuse(np.flatnonzero(counts < 0), "expected a number of tokens that is not negative")
    refuse(np.flatnonzero(lengths < shortest),
           "expected a remaining sequence that is not empty and that keeps a shared prompt")
    refuse(np.flatnonzero(sequences.dropped[slots] > window.num_unseen(lengths)),
           "expected a remaining sequence whose blocks are in the attention window")
    if sequences.max_beam_width > 1:
        partly_filled = np.flatnonzero(lengths % unit > 0)
        is_shared = [any(pool.owners(block_id) > 1
                         for block_id in sequences.table(requests[index])[:, ends[index] - 1].tolist())
                     for index in partly_filled.tolist()]
        refuse(partly_filled[np.array(is_shared, np.bool_)],
               "expected a last block that is full, or that the beams do not share")
    if len(set(slots.tolist())) < len(slots):
        raise InternalError("a rewind has the same request twice", "expected each request once")

    for index in np.flatnonzero(ends < sequences.ends[slots]).tolist():
        table = sequences.table(requests[index])
        for column in reversed(range(int(ends[index]), table.shape[1])):
            for block_id in table[:, column].tolist():
                pool.give_back([block_id], front=True)
    sequences.kv_lengths[slots] = lengths
    sequences.ends[slots] = ends
