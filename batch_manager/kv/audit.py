"""Checks the whole accounting of the KV cache.

The check is slow. Every iteration runs the cheap KvCacheManager.check_totals instead.
"""

from collections import Counter
from collections.abc import Iterator

from ..errors import InternalError, counted
from .block_needs import ceil_div
from .kv_cache_manager import KvCacheManager


def audit(kv_cache_manager: KvCacheManager) -> None:
    """Check that pool, sequences and prefix cache agree. Raises InternalError with a list of the faults."""
    faults = [*kv_cache_manager.pool.faults(), *kv_cache_manager.sequences.faults(), *_disagreements(kv_cache_manager)]
    if faults:
        raise InternalError("the accounting of the KV cache is inconsistent: " + "; ".join(faults))
    kv_cache_manager.check_totals()


def _disagreements(kv: KvCacheManager) -> Iterator[str]:
    named: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for slot, owner in enumerate(kv.sequences.owners):
        if owner is None or owner.seq_slot != slot:
            continue
        named.update(kv.sequences.owners_of(owner))
        held, length = kv.held_blocks(owner), kv.kv_length(owner)
        dropped = int(kv.sequences.dropped[slot])
        if held + dropped != ceil_div(length, kv.tokens_per_block):
            yield f"{owner} holds {counted(held, 'block')} for {counted(length, 'token')} and dropped {dropped}"
        if dropped > kv.window.num_unseen(length):
            yield f"{owner} dropped {counted(dropped, 'block')}, some of them inside its attention window"
        if len(kv.block_ids(owner)) != held:
            yield f"{owner} holds {counted(held, 'block')}, but its table has {len(kv.block_ids(owner))}"
        if length % kv.tokens_per_block and length > owner.prompt_len:
            written.update(kv.block_ids(owner, beam)[-1] for beam in range(owner.beam_width))
        promised = int(kv.sequences.last_blocks[slot])
        if promised != ceil_div(owner.prompt_len + owner.max_new_tokens, kv.tokens_per_block):
            yield f"{owner} has room for {counted(promised, 'block')} per beam, but its lengths need another number"
    for block_id in range(kv.num_blocks):
        if named[block_id] != kv.pool.owners(block_id):
            yield f"block {block_id} is in {named[block_id]} tables and has {kv.pool.owners(block_id)} owners"
    for block_id in written:
        if kv.pool.owners(block_id) > 1:
            yield f"block {block_id} is being written and has {kv.pool.owners(block_id)} owners"
        if kv.cache is not None and kv.cache.index.of_block(block_id) is not None:
            yield f"block {block_id} is being written and is published"
    if any(not 0 <= block_id < kv.num_blocks for block_id in named):
        yield "a table names a block that does not exist"
    if kv.cache is not None:
        yield from kv.cache.faults()
