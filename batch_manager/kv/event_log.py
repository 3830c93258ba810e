"""Collects the events of a prefix cache."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from os import urandom

from ..contained_log import RateLimitedLog
from ..kv_events import HASH_BYTES, KvBlock, KvEvent, as_number, block_hash, root_hash
from .kv_cache_manager import KvCacheManager
from .prefix_index import Domain, PrefixNode


@dataclass(slots=True)
class _Draft:
    kind: str
    blocks: list[KvBlock] = field(default_factory=list)
    previous: KvBlock | None = None


class EventLog:
    """Makes events of the changes of a prefix cache, from its construction on.

    The worker calls all methods but `take_kept`, which any thread may call.

    cache_of      the manager of the cache, which must reuse blocks
    key           key of the hashes that name blocks; None: one of this log alone
    with_tokens   whether the events have token ids
    most_kept     number of events to keep for `take_kept`
    log           where it says that events were dropped

    lora_task_id   that of the request whose blocks are stored now
    num_dropped    number of events that `take_kept` could not return, since construction
    """

    def __init__(self, cache_of: KvCacheManager, *, key: bytes | None = None, with_tokens: bool = False,
                 most_kept: int = 0, log: RateLimitedLog) -> None:
        assert cache_of.cache is not None
        self._cache, self._pool, self._window = cache_of.cache, cache_of.pool, cache_of.window
        self._key = urandom(64) if key is None else key
        self._with_tokens = with_tokens
        self._blocks: dict[PrefixNode, KvBlock] = {}         # of all nodes, parents before their children
        self._salted: set[int] = set()                       # hashes of those under a cache_salt
        self._num_blocks = cache_of.num_blocks, self._cache.host.num_blocks
        self._numbers, self.num_events, self.num_dropped = count(), 0, 0
        self._drafts = [_Draft("created")]
        self._most_kept, self._kept, self._one_at_a_time = most_kept, deque[KvEvent](), threading.Lock()
        self._log = log
        self.lora_task_id: int | None = None
        self._cache.events = self._cache.index.observer = self
        self._pool.priority_changed = self._priority_changed

    @property
    def keeps(self) -> bool:
        """Whether `take_kept` returns events."""
        return self._most_kept > 0

    def figures(self) -> dict[str, int]:
        """Return the statistics of the log."""
        return {"KV Events": self.num_events, "Dropped KV Events": self.num_dropped}

    # What the prefix index and the pool tell.

    def stored(self, node: PrefixNode, domain: Domain | None) -> None:
        assert node.parent is not None
        key, parent, lora_task_id = node.key, self._blocks.get(node.parent), self.lora_task_id
        if domain is not None:
            parent_digest, is_salted = root_hash(self._key, *domain), domain.cache_salt is not None
        else:
            assert parent is not None
            parent_digest, is_salted = parent.block_hash.to_bytes(HASH_BYTES, "big"), parent.block_hash in self._salted
            lora_task_id = parent.lora_task_id
        name = as_number(block_hash(self._key, parent_digest, key.tokens, key.extra_ids))
        if is_salted:
            self._salted.add(name)
        shows = self._with_tokens and not is_salted
        block = self._blocks[node] = KvBlock(
            name, None if parent is None else parent.block_hash, key.tokens if shows else None,
            key.extra_ids if shows else None, _level(node), self._priority(node), lora_task_id,
            len(key.tokens) == self._cache.tokens_per_block)
        last = self._drafts[-1] if self._drafts else None
        if parent is None or last is None or last.kind != "stored" or last.blocks[-1].block_hash != block.parent_hash:
            last = _Draft("stored")
            self._drafts.append(last)
        last.blocks.append(block)

    def moved(self, node: PrefixNode) -> None:
        self._update(node, self._blocks[node]._replace(cache_level=_level(node)))

    def removed(self, nodes: Sequence[PrefixNode]) -> None:
        gone = [self._blocks.pop(node) for node in reversed(nodes)]
        self._salted.difference_update(block.block_hash for block in gone)
        self._drafts.append(_Draft("removed", gone))

    def _priority_changed(self, block_id: int, priority: int) -> None:
        node = self._cache.index.of_block(block_id)
        if node is not None and self._blocks[node].priority != priority:
            self._update(node, self._blocks[node]._replace(priority=priority))

    def _priority(self, node: PrefixNode) -> int:
        if node.block_id is not None:
            return self._pool.priority(node.block_id)
        assert node.host_id is not None
        return self._cache.host.priority(node.host_id)

    def _update(self, node: PrefixNode, block: KvBlock) -> None:
        previous, self._blocks[node] = self._blocks[node], block
        self._drafts.append(_Draft("updated", [block], previous))

    # What the loop and the user take.

    def collect(self) -> list[KvEvent]:
        """Return the events since the last call."""
        drafts, self._drafts = self._drafts, []
        events = [self._event(draft, next(self._numbers)) for draft in drafts]
        self.num_events += len(events)
        if self._most_kept:
            with self._one_at_a_time:
                self._kept.extend(events)
                too_many = max(len(self._kept) - self._most_kept, 0)
                for _ in range(too_many):
                    self._kept.popleft()
            if too_many:
                self.num_dropped += too_many
                self._log.log(logging.WARNING, "%d KV events were dropped (%d so far), because take_kv_events was not "
                              "called in time; raise KvCacheConfig.event_buffer_max_size", too_many, self.num_dropped)
        return events

    def take_kept(self) -> list[KvEvent]:
        """Return the collected events that no call has returned yet, at most `most_kept`, the newest ones."""
        with self._one_at_a_time:
            kept, self._kept = self._kept, deque()
        return list(kept)

    def snapshot(self) -> list[KvEvent]:
        """Return events that say what can be found now, to a subscriber that begins with the next collected event.

        All have the number of the last collected event, or -1.
        """
        drafts = [_Draft("created")]
        for block in self._blocks.values():
            last = drafts[-1].blocks
            if not last or last[-1].block_hash != block.parent_hash:
                drafts.append(_Draft("stored"))
            drafts[-1].blocks.append(block)
        return [self._event(draft, self.num_events - 1) for draft in drafts]

    def _event(self, draft: _Draft, number: int) -> KvEvent:
        return KvEvent(number, draft.kind, self._window.size, self._cache.tokens_per_block, tuple(draft.blocks),
                       draft.previous, self._num_blocks if draft.kind == "created" else (), self._window.slides)


def _level(node: PrefixNode) -> int:
    return 0 if node.host_id is None else 1
