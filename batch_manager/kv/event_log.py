"""Collects the events of a prefix cache."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import urandom
from typing import Any

from ..contained_log import RateLimitedLog
from ..kv_events import KvBlock, KvEvent, as_number, block_hash, root_hash
from .eviction import DEFAULT_PRIORITY
from .kv_cache_manager import KvCacheManager
from .prefix_index import Domain, PrefixNode, Told

_State = tuple[PrefixNode, Told]               # a block, and its level, priority and adapter at one time
# What an event is made of: its kind, the blocks, and with "updated" the block before. The blocks of "removed" are nodes
# alone, parents first, which do not change any more. Tuples, because objects of a class cost the worker more.
_Draft = tuple[str, Sequence[Any], _State | None]


class _Events(Sequence[KvEvent]):
    """Events that are made when they are read first, in the reader's thread, because names are digests of tokens.

    first   number of the first event
    step    0: all have this number; 1: it rises
    """

    __slots__ = ("_drafts", "_first", "_step", "_make", "_made")

    def __init__(self, drafts: Sequence[_Draft], first: int, make: Callable[[int, _Draft], KvEvent],
                 step: int = 1) -> None:
        self._drafts, self._first, self._step, self._make = drafts, first, step, make
        self._made: list[KvEvent] | None = None

    def __len__(self) -> int:
        return len(self._drafts)

    def __getitem__(self, index: Any) -> Any:
        return self._events()[index]

    def __iter__(self) -> Iterator[KvEvent]:
        return iter(self._events())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._events(),)

    def _events(self) -> list[KvEvent]:
        if self._made is None:
            self._made = [self._make(self._first + self._step * place, draft)
                          for place, draft in enumerate(self._drafts)]
        return self._made


class EventLog:
    """Notes the changes of a prefix cache, from its construction on, and returns events of them.

    The worker calls all methods but `take_kept`, which any thread may call. It only notes; the first reader of an event
    makes it.

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
        self._num_blocks = cache_of.num_blocks, self._cache.host.num_blocks
        self.num_events = self.num_dropped = 0
        self._drafts: list[_Draft] = [("created", (), None)]             # not collected
        self._num_numbered = 0                               # of them, the ones that `num_events` counts
        self._last: PrefixNode | None = None                 # of the newest draft, if that is "stored"
        self._stored: list[_State] = []                      # its blocks
        self._in_pool: Told = (0, DEFAULT_PRIORITY, None)    # what is told of most blocks
        self._most_kept, self._kept = most_kept, deque[tuple[int, _Draft]]()
        self._one_at_a_time = threading.Lock()
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

    def stored(self, node: PrefixNode) -> None:
        told = self._in_pool
        if node.host_id is not None or self._pool.has_priorities or told[2] != self.lora_task_id:
            told = self._told(node)
        node.told = told
        if node.parent is self._last:
            self._stored.append((node, told))
        else:
            self._stored = [(node, told)]
            self._drafts.append(("stored", self._stored, None))
        self._last = node

    def moved(self, node: PrefixNode) -> None:
        self._update(node, 0 if node.host_id is None else 1, node.told[1])

    def removed(self, nodes: Sequence[PrefixNode]) -> None:
        self._drafts.append(("removed", nodes, None))
        self._last = None

    def _priority_changed(self, block_id: int, priority: int) -> None:
        node = self._cache.index.of_block(block_id)
        if node is not None and node.told[1] != priority:
            self._update(node, node.told[0], priority)

    def _told(self, node: PrefixNode) -> Told:
        """Return what is to be told of a new block."""
        self._in_pool = 0, DEFAULT_PRIORITY, self.lora_task_id
        if node.host_id is not None:
            return 1, self._cache.host.priority(node.host_id), self.lora_task_id
        assert node.block_id is not None
        return 0, self._pool.priority(node.block_id), self.lora_task_id

    def _update(self, node: PrefixNode, level: int, priority: int) -> None:
        previous, node.told = node.told, (level, priority, node.told[2])
        self._drafts.append(("updated", [(node, node.told)], (node, previous)))
        self._last = None

    # What the loop and the user take.

    def collect(self) -> Sequence[KvEvent]:
        """Return the events since the last call."""
        drafts = self._drafts
        if not drafts:
            return ()
        self._number()
        self._drafts, self._num_numbered = [], 0
        return _Events(drafts, self.num_events - len(drafts), self._event)

    def _number(self) -> None:
        """Number the changes so far, and keep them for `take_kept`."""
        first, new = self.num_events, len(self._drafts) - self._num_numbered
        self.num_events, self._num_numbered, self._last = first + new, len(self._drafts), None
        if self._most_kept and new:
            with self._one_at_a_time:
                self._kept.extend(enumerate(self._drafts[-new:], first))
                too_many = max(len(self._kept) - self._most_kept, 0)
                for _ in range(too_many):
                    self._kept.popleft()
            if too_many:
                self.num_dropped += too_many
                self._log.log(logging.WARNING, "%d KV events were dropped (%d so far), because take_kv_events was not "
                              "called in time; raise KvCacheConfig.event_buffer_max_size", too_many, self.num_dropped)

    def take_kept(self) -> list[KvEvent]:
        """Return the collected events that no call has returned yet, at most `most_kept`, the newest ones."""
        with self._one_at_a_time:
            kept, self._kept = self._kept, deque()
        return [self._event(*numbered) for numbered in kept]

    def snapshot(self) -> Sequence[KvEvent]:
        """Return events that say what can be found now, to a subscriber that goes on with the event after them.

        All have the number of the newest event. Inside a callback, events of the running iteration are among those
        that they replace.
        """
        self._number()
        drafts: list[_Draft] = [("created", (), None)]
        blocks: list[_State] = []
        for node in self._cache.index:
            if not blocks or blocks[-1][0] is not node.parent:
                blocks = []
                drafts.append(("stored", blocks, None))
            blocks.append((node, node.told))
        return _Events(drafts, self.num_events - 1, self._event, 0)

    # What a reader makes of it, in any thread.

    def _event(self, number: int, draft: _Draft) -> KvEvent:
        kind, blocks, previous = draft
        if kind == "removed":
            blocks = [(node, node.told) for node in reversed(blocks)]
        shows = self._with_tokens and bool(blocks) and _domain_of(blocks[0][0]).cache_salt is None
        return KvEvent(number, kind, self._window.size, self._cache.tokens_per_block,
                       tuple([self._block(node, told, shows) for node, told in blocks]),
                       None if previous is None else self._block(*previous, shows),
                       self._num_blocks if kind == "created" else (), self._window.slides)

    def _block(self, node: PrefixNode, told: Told, shows: bool) -> KvBlock:
        """Return a block of an event. `shows` says whether with its tokens."""
        key, parent = node.key, node.parent
        assert parent is not None                            # only roots have none, which are no blocks
        level, priority, lora_task_id = told
        return KvBlock(
            as_number(self._name(node)), None if parent.domain is not None else as_number(self._name(parent)),
            key.tokens if shows else None, key.extra_ids if shows else None, level, priority, lora_task_id,
            len(key.tokens) == self._cache.tokens_per_block)

    def _name(self, node: PrefixNode) -> bytes:
        """Return the digest of a node. The first call computes it, and those of all blocks before this one."""
        unnamed, name = [], node.name
        while name is None:
            if node.domain is not None:
                name = root_hash(self._key, *node.domain)
                break
            unnamed.append(node)
            assert node.parent is not None
            node = node.parent
            name = node.name
        for below in reversed(unnamed):
            name = below.name = block_hash(self._key, name, below.key.tokens, below.key.extra_ids)
        return name


def _domain_of(node: PrefixNode) -> Domain:
    while node.domain is None:
        assert node.parent is not None
        node = node.parent
    return node.domain
