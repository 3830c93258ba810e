"""The store of blocks in the simulator: a dictionary, and what happens to it.

The tokens and stamps of the simulated device travel with the bytes of a block, so that a block that comes back as
another's is found out like any other.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from batch_manager.stores.interface import StoredBlock
from batch_manager.stores.stored_blocks import StoredBlocks

from .faults import Faults
from .traffic import SimulatedThreads

if TYPE_CHECKING:
    from .world import SimulatedWorld

MORE_FAULTS = 4           # the chances of these faults are fewer than those of others


class SimulatedStore:
    """A stores.interface.BlockStore of a world. `threads` call it."""

    def __init__(self, world: "SimulatedWorld") -> None:
        swarm = world.swarm
        self.world, self.most = world, swarm.stored_blocks
        self.faults = Faults(Random(f"store faults {swarm.seed}"), swarm.faults, MORE_FAULTS * swarm.fault_rate)
        self._rng = self.faults.rng
        self._blocks: dict[StoredBlock, tuple[bytes, list]] = {}      # oldest use first
        self._num_saved, self._num_loaded = 0, 0
        self.threads = SimulatedThreads(world, self._rng)
        self.all_threads = [self.threads]

    def watch(self, stored: StoredBlocks) -> None:
        stored._threads = self.threads

    def move(self) -> None:
        """Between two turns: jobs end, unless the store is slow."""
        if self._blocks and self._fault("store.other_process", rarely=True):
            for block in self._rng.sample(list(self._blocks), len(self._blocks) // 2):
                del self._blocks[block]
        self.threads.move(lambda: bool(self._fault("store.slow")))

    def violations(self, now: float) -> list[str]:
        """Return what is wrong with the figures after a turn."""
        figures, found = self.world.loop.stored._figures, []
        for name, count in (("Store Saved Blocks", self._num_saved), ("Store Loaded Blocks", self._num_loaded)):
            if figures[name] > count:
                found.append(f"I36: {name} is {figures[name]}, and the store counted {count}")
        if figures["Store Loaded Blocks"]:
            self.world.mark("blocks come from the store")
        return found

    def held_ids(self) -> set[int]:
        return set()

    def close(self) -> None:
        self.world.check(self.threads.is_closed, "I36: the store ends before its threads")

    # as the store

    def count(self, blocks: Sequence[StoredBlock]) -> int:
        known = next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        fault = self._fault("store.promises") or self._fault("store.raises", rarely=True)
        return len(blocks) if fault == "store.promises" and blocks else known

    def load(self, blocks: Sequence[StoredBlock], buffers: Sequence[memoryview]) -> int:
        fault, device = self._fault("store.raises", "store.damaged"), self.world.device
        host_ids = device.take_host_ids()
        damaged = self._rng.randrange(len(blocks)) if fault == "store.damaged" else len(blocks)
        for place, (block, buffer, host_id) in enumerate(zip(blocks, buffers, host_ids, strict=True)):
            if place == damaged or block not in self._blocks:
                buffer[:] = b"\1" * len(buffer)                       # what was read before the fault was found
                self._blocks.pop(block, None)
                return place
            content, stamps = self._blocks[block] = self._blocks.pop(block)
            buffer[:] = content
            device.set_host_stamp(host_id, stamps)
            self._num_loaded += 1
        return len(blocks)

    def save(self, block: StoredBlock, content: memoryview) -> None:
        (host_id,) = self.world.device.take_host_ids()
        self._fault("store.raises", "store.full")
        while len(self._blocks) >= self.most:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[block] = bytes(content), self.world.device.host_stamp(host_id)
        self._num_saved += 1
        if self.world.loop.is_empty:
            self.world.mark("an idle engine saves")

    def figures(self) -> Mapping[str, int]:
        self._fault("store.raises", rarely=True)
        return {"Blocks": len(self._blocks)}

    def _fault(self, *names: str, rarely: bool = False) -> str | None:
        enabled = [name for name in names if name in self.world.swarm.faults]
        if not enabled or self._rng.random() >= (0.1 if rarely else MORE_FAULTS) * self.world.swarm.fault_rate:
            return None
        fault = self._rng.choice(enabled)
        self.faults.hit(fault)
        if fault in ("store.raises", "store.full"):
            self.world.device.take_host_ids()
            kinds = [OSError, ValueError, MemoryError] if fault == "store.raises" else [partial(OSError, 28)]
            raise self._rng.choice(kinds)("planted")
        return fault
