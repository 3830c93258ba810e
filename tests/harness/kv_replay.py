"""A subscriber that keeps what events of a prefix cache say, and compares it with the index."""

from collections.abc import Iterator
from typing import Any

from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv_events import KvEvent, as_number, block_hash, root_hash

KEY = b"a key of the tests"


class Replay:
    """What a subscriber knows: hash -> (hash of the parent, level, priority). Its method is a hook `kv_events`."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, int, int]] = {}
        self.levels: tuple[int, ...] = ()
        self.next_id = 0
        self.complaints: list[str] = []
        self._names: dict[Any, tuple[bytes, int, int | None]] = {}    # -> digest, its number, the parent's

    def __call__(self, events: list[KvEvent]) -> None:
        if not events:
            self.complaints.append("a call without events")
        for event in events:
            if event.event_id != self.next_id:
                self.complaints.append(f"event {event.event_id} comes as event {self.next_id}")
            self.next_id = event.event_id + 1
            self.take(event)

    def take(self, event: KvEvent) -> None:
        if event.kind == "created":
            self.blocks, self.levels = {}, event.num_blocks_per_cache_level
        parents = {parent for parent, _, _ in self.blocks.values()} if event.kind == "removed" else set()
        for block in event.blocks:
            name, state = block.block_hash, (block.parent_hash, block.cache_level, block.priority)
            known = self.blocks.get(name)
            if event.kind == "stored":
                if known is not None or not (block.parent_hash is None or block.parent_hash in self.blocks):
                    self.complaints.append(f"block {name} is stored twice, or before its parent")
            elif event.kind == "removed":
                if known != state:
                    self.complaints.append(f"block {name} is removed as {state}, and was {known}")
                del self.blocks[name]
                if name in parents and name in {parent for parent, _, _ in self.blocks.values()}:
                    self.complaints.append(f"block {name} is removed before a block below it")
                continue
            else:
                previous = event.previous
                if known != (previous.parent_hash, previous.cache_level, previous.priority) or known == state:
                    self.complaints.append(f"block {name} goes from {previous} to {state}, and was {known}")
            self.blocks[name] = state

    def faults(self, kv: KvCacheManager) -> Iterator[str]:
        """Describe the differences between what is known and the index of the manager."""
        yield from self.complaints
        assert kv.cache is not None
        known, names, expected = self._names, {}, {}
        of_pool, of_host = kv.pool.priority, kv.cache.host.priority
        for node in kv.cache.index:                        # parents before children
            parent = node.parent
            name = known.get(node)
            if name is None:
                above, number, _ = names.get(parent) or (root_hash(KEY, *parent.domain), None, None)
                digest = block_hash(KEY, above, node.key.tokens, node.key.extra_ids)
                name = digest, as_number(digest), number
            names[node] = name
            host_id = node.host_id
            expected[name[1]] = ((name[2], 0, of_pool(node.block_id)) if host_id is None
                                 else (name[2], 1, of_host(host_id)))
        self._names = names
        if expected != self.blocks:
            wrong = {name for name in expected.keys() | self.blocks.keys()
                     if expected.get(name) != self.blocks.get(name)}
            yield f"the events say of {len(wrong)} blocks what is not so, for example of {min(wrong)}"
