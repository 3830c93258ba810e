"""Collects the events of a prefix cache."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import urandom
from typing import Any

from ..contained_log import RateLimitedLog
from ..kv_events import KvBlock, KvEvent, as_number, block_hash, root_hash
from .eviction import DEFAULT_PRIORITY
from .kv_cache_manager import KvCacheManager
from .prefix_index import BlockKey, Domain, PrefixNode


@dataclass(slots=True, eq=False)
class _Block:
    """A block that can be found, with its last known level and priority.

    parent   the block before it; None: it is the first
    domain   that of its prompts
    digest   names it in events; None: not computed yet
    """

    key: BlockKey
    parent: "_Block | None"
    domain: Domain
    lora_task_id: int | None
    cache_level: int
    priority: int
    digest: bytes | None = None

    @property
    def state(self) -> "_State":
        return self, self.cache_level, self.priority

    def digest_with(self, secret: bytes) -> bytes:
        """Return the digest. The first call, in any thread, computes it, and those of all blocks before this one."""
        unnamed: list[_Block] = []
        block: _Block | None = self
        while block is not None and block.digest is None:
            unnamed.append(block)
            block = block.parent
        digest = None if block is None else block.digest
        if digest is None:
            digest = root_hash(secret, *self.domain)
        for block in reversed(unnamed):
            digest = block.digest = block_hash(secret, digest, block.key.tokens, block.key.extra_ids)
        return digest


_State = tuple[_Block, int, int]               # a block, and its level and priority at one time


@dataclass(slots=True)
class _Draft:
    """What an event is made of."""

    kind: str
    blocks: list[_State] = field(default_factory=list)
    previous: _State | None = None
    number: int = -1


class _Events(Sequence[KvEvent]):
    """Events that are made when they are read first, in the reader's thread, because names are digests of tokens."""

    def __init__(self, drafts: Sequence[_Draft], make: Callable[[_Draft], KvEvent]) -> None:
        self._drafts, self._make = drafts, make
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
            self._made = list(map(self._make, self._drafts))
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
        self._blocks: dict[PrefixNode, _Block] = {}          # of all nodes, parents before their children
        self._num_blocks = cache_of.num_blocks, self._cache.host.num_blocks
        self.num_events = self.num_dropped = 0
        self._drafts = [_Draft("created")]                   # without numbers
        self._numbered: list[_Draft] = []                    # and not collected
        self._most_kept, self._kept, self._one_at_a_time = most_kept, deque[_Draft](), threading.Lock()
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
        parent, lora_task_id = self._blocks.get(node.parent), self.lora_task_id
        if domain is None:
            assert parent is not None
            domain, lora_task_id = parent.domain, parent.lora_task_id
        level = 0 if node.host_id is None else 1
        priority = self._priority(node) if self._pool.has_priorities else DEFAULT_PRIORITY
        block = self._blocks[node] = _Block(node.key, parent, domain, lora_task_id, level, priority)
        last = self._drafts[-1] if self._drafts else None
        if parent is None or last is None or last.kind != "stored" or last.blocks[-1][0] is not parent:
            last = _Draft("stored")
            self._drafts.append(last)
        last.blocks.append((block, level, priority))

    def moved(self, node: PrefixNode) -> None:
        block = self._blocks[node]
        self._update(block, 0 if node.host_id is None else 1, block.priority)

    def removed(self, nodes: Sequence[PrefixNode]) -> None:
        self._drafts.append(_Draft("removed", [self._blocks.pop(node).state for node in reversed(nodes)]))

    def _priority_changed(self, block_id: int, priority: int) -> None:
        node = self._cache.index.of_block(block_id)
        if node is not None and (block := self._blocks[node]).priority != priority:
            self._update(block, block.cache_level, priority)

    def _priority(self, node: PrefixNode) -> int:
        if node.block_id is not None:
            return self._pool.priority(node.block_id)
        assert node.host_id is not None
        return self._cache.host.priority(node.host_id)

    def _update(self, block: _Block, level: int, priority: int) -> None:
        previous = block.state
        block.cache_level, block.priority = level, priority
        self._drafts.append(_Draft("updated", [block.state], previous))

    # What the loop and the user take.

    def collect(self) -> Sequence[KvEvent]:
        """Return the events since the last call."""
        self._number()
        drafts, self._numbered = self._numbered, []
        return _Events(drafts, self._event)

    def _number(self) -> None:
        """Number the changes so far, and keep them for `take_kept`."""
        drafts, self._drafts = self._drafts, []
        for number, draft in enumerate(drafts, self.num_events):
            draft.number = number
        self.num_events += len(drafts)
        self._numbered += drafts
        if self._most_kept:
            with self._one_at_a_time:
                self._kept.extend(drafts)
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
        return list(map(self._event, kept))

    def snapshot(self) -> Sequence[KvEvent]:
        """Return events that say what can be found now, to a subscriber that goes on with the event after them.

        All have the number of the newest event. Inside a callback, events of the running iteration are among those
        that they replace.
        """
        self._number()
        newest = self.num_events - 1
        drafts = [_Draft("created", number=newest)]
        for block in self._blocks.values():
            last = drafts[-1].blocks
            if not last or last[-1][0] is not block.parent:
                last = []
                drafts.append(_Draft("stored", last, number=newest))
            last.append(block.state)
        return _Events(drafts, self._event)

    def _event(self, draft: _Draft) -> KvEvent:
        return KvEvent(draft.number, draft.kind, self._window.size, self._cache.tokens_per_block,
                       tuple(map(self._block, draft.blocks)),
                       None if draft.previous is None else self._block(draft.previous),
                       self._num_blocks if draft.kind == "created" else (), self._window.slides)

    def _block(self, state: _State) -> KvBlock:
        block, level, priority = state
        key, parent = block.key, block.parent
        shows = self._with_tokens and block.domain.cache_salt is None
        return KvBlock(
            as_number(block.digest_with(self._key)),
            None if parent is None else as_number(parent.digest_with(self._key)),
            key.tokens if shows else None, key.extra_ids if shows else None, level, priority, block.lora_task_id,
            len(key.tokens) == self._cache.tokens_per_block)
