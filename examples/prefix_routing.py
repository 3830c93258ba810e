"""Which replica gets a prompt: the one that has the longest beginning of it in its cache. Used by examples/ray_app.py.

Each replica follows the events of its prefix cache (`CachedBlocks`) and reports the names of its blocks. A router with
the same `event_hash_key` computes the names of a prompt's blocks, and asks `ranked`.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from batch_manager import KvEvent

BLOCK_TOKENS = 64           # tokens of a KV cache block; shorter prefixes are not reused
LEAST_FREE_SHARE = 0.1      # of the KV cache blocks; a replica with a smaller share is the last choice


class CachedBlocks:
    """The full blocks that an engine can find, from its events."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def take(self, events: Iterable[KvEvent]) -> None:
        """Follow the next events. All events since the start of the engine are needed."""
        for event in events:
            hashes = [block.block_hash for block in event.blocks if block.is_full]
            if event.kind == "created":
                self._hashes.clear()
            elif event.kind == "stored":
                self._hashes.update(hashes)
            elif event.kind == "removed":
                self._hashes.difference_update(hashes)

    def packed(self) -> bytes:
        """Return the names of the blocks, 8 bytes each."""
        return array("Q", self._hashes).tobytes()


@lru_cache(maxsize=64)
def _unpacked(names: bytes) -> frozenset[int]:
    return frozenset(array("Q", names))


def ranked(statistics: Mapping[str, Mapping[str, Any]], input_ids: Sequence[int], block_hashes: Sequence[int] = ()
           ) -> list[str]:
    """Return the names of the replicas for a prompt, best first.

    Replicas that have room come before the others. In each of the two groups, a replica with more leading blocks of the
    prompt comes first. Where they have equally many, the order depends only on the first block of the prompt and on the
    names of the replicas, so that prompts that begin alike meet before any replica has reported their blocks.

    statistics     name of a replica -> `cached`: CachedBlocks.packed(); `free_share` of the KV cache blocks; `active`
                   and `max_active` requests. All may be missing, as before the first report
    block_hashes   `kv_block_hashes` of the prompt
    """
    prefix = repr(list(input_ids[:BLOCK_TOKENS])).encode()

    def score(name: str) -> tuple[bool, int, bytes]:
        of_replica = statistics[name]
        has_room = of_replica.get("free_share", 1.0) >= LEAST_FREE_SHARE and (
            of_replica.get("active", 0) < of_replica.get("max_active", float("inf")))
        cached = _unpacked(of_replica.get("cached", b""))
        num_leading = next((place for place, each in enumerate(block_hashes) if each not in cached), len(block_hashes))
        return has_room, num_leading, blake2b(prefix, key=name.encode()[:64]).digest()
    return sorted(statistics, key=score, reverse=True)
