"""Applies a request's retention configuration to its blocks."""

from bisect import bisect_right
from collections.abc import Sequence

from ..requests.llm_request import LlmRequest
from ..requests.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from .block_needs import ceil_div
from .block_pool import BlockPool
from .eviction import DEFAULT_PRIORITY


def ranges_of_blocks(retention: KvCacheRetentionConfig, tokens_per_block: int,
                     seq_len: int) -> list[TokenRangeRetentionConfig | None]:
    """Return, for each block of a sequence of `seq_len` tokens, its range of `retention`.

    The range of a block contains the block's first token. None: no range contains it.
    """
    ranges = retention.token_range_retention_configs
    starts = [part.token_start for part in ranges]
    found = []
    for first_token in range(0, ceil_div(seq_len, tokens_per_block) * tokens_per_block, tokens_per_block):
        index = bisect_right(starts, first_token) - 1
        part = ranges[index] if index >= 0 else None
        if part is not None and part.token_end is not None and part.token_end <= first_token:
            part = None
        found.append(part)
    return found


def priorities_of_blocks(retention: KvCacheRetentionConfig, tokens_per_block: int, seq_len: int) -> list[int | None]:
    """Return, for each block of a sequence of `seq_len` tokens, its priority in `retention`, or None."""
    return [None if part is None else part.priority for part in ranges_of_blocks(retention, tokens_per_block, seq_len)]


def retain_prompt(pool: BlockPool, request: LlmRequest, block_ids: Sequence[int], found: int,
                  tokens_per_block: int) -> None:
    """Set the priorities of the blocks of a prompt.

    found   number of reused blocks, which keep their priority unless the request configures one
    """
    if request.retention is None:
        for block_id in block_ids[found:]:
            pool.set_priority(block_id, DEFAULT_PRIORITY)
        return
    parts = ranges_of_blocks(request.retention, tokens_per_block, request.prompt_len)
    parts += [parts[-1]] * (len(block_ids) - len(parts))       # the last block of each beam
    for index, (block_id, part) in enumerate(zip(block_ids, parts, strict=True)):
        if part is not None:
            pool.set_priority(block_id, part.priority, _seconds(part.duration_ms))
        elif index >= found:
            pool.set_priority(block_id, DEFAULT_PRIORITY)


def retain_generated(pool: BlockPool, request: LlmRequest, block_id: int) -> None:
    """Set the priority of a block of generated tokens. If the request configures none, the block gets the default."""
    retention = request.retention
    if retention is None:
        pool.set_priority(block_id, DEFAULT_PRIORITY)
    else:
        pool.set_priority(block_id, retention.decode_retention_priority, _seconds(retention.decode_duration_ms))


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
