"""What a store of blocks is."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

KEY_BYTES = 32


class StoredBlock(NamedTuple):
    """The name of a full block.

    key         digest of `parent`, tokens and extra ids. Equal in all processes with equal content: the digest above
                the first block names the weights, everything else that the content depends on, the adapter and the
                cache_salt
    parent      key of the block before it, or that digest
    token_ids   its tokens
    extra_ids   an extra id for each token, or None
    """

    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    extra_ids: tuple[int, ...] | None


class BlockStore(Protocol):
    """Keeps the content of blocks outside of the engine. A structural protocol.

    `load` and `save` run on threads of the engine's, several at a time; `count` and `figures` on the worker. Any
    exception costs the call alone: the engine computes what it did not get.
    """

    def count(self, blocks: Sequence[StoredBlock]) -> int:
        """Return how many leading blocks the store has, from memory, at once."""
        ...

    def load(self, blocks: Sequence[StoredBlock], buffers: Sequence[memoryview]) -> int:
        """Fill buffers with the contents of blocks, in order. Return how many leading ones are filled and right.

        The engine trusts this number: compare what is stored with the whole StoredBlock, not with the key alone.
        """
        ...

    def save(self, block: StoredBlock, content: memoryview) -> None:
        """Keep the content of a block. Must not use `content` after it has returned."""
        ...

    def figures(self) -> Mapping[str, int]:
        """Return the store's own statistics. All are left out if a name has no UTF-8, or a value more than 64 bits."""
        ...

    def close(self) -> None:
        """Called once, after all other calls have returned; on a thread if one returns so late that the engine ends."""
        ...

    # Optional. Called on a thread every few seconds while requests arrive, to look for what other processes have saved:
    #     def refresh(self) -> None
