"""Gives first chunks the blocks of their whole prompts."""

from collections.abc import Sequence
from itertools import islice

from ..requests.llm_request import LlmRequest
from . import block_needs
from .block_pool import BlockPool, OutOfBlocksError
from .prefix_cache import PrefixCache
from .prefix_claim import PrefixClaim
from .sequence_table import Entries, SequenceTable


def start(pool: BlockPool, sequences: SequenceTable, first_chunks: Sequence[LlmRequest], taken_elsewhere: int,
          tokens_per_block: int) -> list[Entries]:
    """Blocks from the pool; beams share all but a last one that is not full.

    taken_elsewhere   blocks that must be left for the same step

    Raises OutOfBlocksError; nothing was changed then.
    """
    counts = [block_needs.blocks_of_prompt(request.prompt_len, tokens_per_block, request.beam_width)
              for request in first_chunks]
    wanted = sum(counts)
    if wanted + taken_elsewhere > pool.num_free:
        raise OutOfBlocksError(wanted + taken_elsewhere, pool.num_free)
    taken = iter(pool.take(wanted))
    changed = []
    for request, count in zip(first_chunks, counts, strict=True):
        block_ids = list(islice(taken, count))
        private = request.beam_width if request.prompt_len % tokens_per_block else 0
        for block_id in block_ids[:count - private] * (request.beam_width - 1):
            pool.share(block_id)
        changed.append(sequences.add(request, block_ids, _last_blocks(request, tokens_per_block), private))
    return changed


def start_with_reuse(cache: PrefixCache, sequences: SequenceTable, first_chunks: Sequence[LlmRequest],
                     taken_elsewhere: int) -> list[Entries]:
    """The same with what is cached of the prompts. `sequences.reused_tokens` says how much that was."""
    claim = PrefixClaim(cache, first_chunks, taken_elsewhere)
    if claim.needed > cache.pool.num_free:
        raise OutOfBlocksError(claim.needed, cache.pool.num_free)
    changed = []
    for request, begun in zip(first_chunks, claim.start(), strict=True):
        changed.append(sequences.add(request, begun.block_ids, _last_blocks(request, cache.tokens_per_block),
                                     request.beam_width))
        sequences.reused_tokens[request.seq_slot] = begun.reused_tokens
    return changed


def _last_blocks(request: LlmRequest, tokens_per_block: int) -> int:
    return block_needs.ceil_div(request.prompt_len + request.max_new_tokens, tokens_per_block)
