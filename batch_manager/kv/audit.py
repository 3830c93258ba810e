"""Whether the books agree: every block is free or owned, and every owner knows its blocks.

The cheap check runs after every iteration, the thorough one in tests and when the engine is idle.
"""

from collections import Counter
from collections.abc import Iterator

from ..errors import InternalError
from .block_needs import ceil_div
from .kv_cache_manager import KvCacheManager


def check_totals(kv_cache_manager: KvCacheManager) -> None:
    """free + live == total, with the live blocks counted over the sequences.

    Raises InternalError.
    """
    free, live, total = (kv_cache_manager.free_blocks, int(kv_cache_manager.sequences.held.sum()),
                         kv_cache_manager.num_blocks)
    if free + live != total:
        raise InternalError(f"{free} blocks are free and {live} are held", f"{total} in all")


def audit(kv_cache_manager: KvCacheManager) -> None:
    """Everything: the pool in itself, the sequences in themselves, and one against the other.

    Raises InternalError that lists what is wrong.
    """
    faults = [*kv_cache_manager.pool.faults(), *kv_cache_manager.sequences.faults(), *_disagreements(kv_cache_manager)]
    if faults:
        raise InternalError("the KV cache's books do not agree: " + "; ".join(faults))
    check_totals(kv_cache_manager)


def _disagreements(kv: KvCacheManager) -> Iterator[str]:
    named: Counter[int] = Counter()
    for owner in filter(None, kv.sequences.owners):
        named.update(kv.block_ids(owner))
        held, length = kv.held_blocks(owner), kv.kv_length(owner)
        if held != ceil_div(length, kv.tokens_per_block):
            yield f"{owner} holds {held} blocks for {length} tokens"
        if kv.owns(owner):
            promised = int(kv.sequences.last_blocks[owner.seq_slot])
            if promised != kv.get_needed_resource_to_completion(owner):
                yield f"{owner} was promised {promised} blocks"
    for block_id in range(kv.num_blocks):
        if named[block_id] != kv.pool.owners(block_id):
            yield f"block {block_id} is in {named[block_id]} tables and has {kv.pool.owners(block_id)} owners"
    if any(not 0 <= block_id < kv.num_blocks for block_id in named):
        yield "a table names a block that does not exist"
