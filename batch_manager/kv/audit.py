"""Whether the books agree: every block is free or owned, and every owner knows its blocks.

The cheap check runs after every iteration, the thorough one in tests and when the engine is idle.
"""

from ..errors import InternalError
from .kv_cache_manager import KvCacheManager


def check_totals(kv_cache_manager: KvCacheManager) -> None:
    """free + live == total, with the live blocks counted over the sequences.

    Raises InternalError.
    """
    kv = kv_cache_manager
    live = kv.held_by_all()
    if kv.free_blocks + live != kv.num_blocks:
        raise InternalError(f"{kv.free_blocks} blocks are free and {live} are held", f"{kv.num_blocks} in all")


def audit(kv_cache_manager: KvCacheManager) -> None:
    """Everything: the pool in itself, the tables in themselves, and one against the other.

    Raises InternalError that lists what is wrong.
    """
    faults = [*kv_cache_manager.pool.faults(), *kv_cache_manager.faults()]
    if faults:
        raise InternalError("the KV cache's books do not agree: " + "; ".join(faults))
    check_totals(kv_cache_manager)
