"""The store of blocks in the simulator: a dictionary, threads that run when the world says, and what happens to both.

The tokens and stamps of the simulated device travel with the bytes of a block, so that a block that comes back as
another's is found out like any other. Whatever the store does, no request may notice more than the time it takes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from batch_manager.stores.interface import StoredBlock
from batch_manager.stores.stored_blocks import StoredBlocks, Waiting

from .faults import Faults

if TYPE_CHECKING:
    from .world import SimulatedWorld

MORE_FAULTS = 4           # the chances of these faults are fewer than those of others
SOME = 0.6                # share of the jobs that end in a turn


class SimulatedStore:
    """A stores.interface.BlockStore of a world, and the threads that call it.

    loading    ids of the requests that have waited for blocks
    """

    def __init__(self, world: "SimulatedWorld") -> None:
        swarm = world.swarm
        self.world, self.most = world, swarm.stored_blocks
        self.faults = Faults(Random(f"store faults {swarm.seed}"), swarm.faults, MORE_FAULTS * swarm.fault_rate)
        self._rng = self.faults.rng
        self._blocks: dict[StoredBlock, tuple[bytes, list]] = {}      # oldest use first
        self._jobs: list[Callable[[], None]] = []
        self._late, self._num_saved, self._num_loaded, self.is_closed = 0, 0, 0, False
        self._before: dict[int, Waiting] = {}                        # what waited before the turn
        self.loading: set[int] = set()

    def watch(self, stored: StoredBlocks) -> None:
        stored._threads = self

    # as the threads

    def submit(self, job: Callable[[], None]) -> None:
        self.world.check(not self.is_closed, "I36: the threads of the store have ended and get a job")
        self._jobs.append(job)

    def close(self, seconds: float = 0.0) -> bool:
        """Of the engine's threads, and then of the store."""
        self._run(len(self._jobs))
        self.is_closed = True
        return True

    def _run(self, count: int) -> None:
        """Run jobs. There are two threads, so that a job may end before the one that came before it."""
        for _ in range(count):
            self._jobs.pop(self._rng.randrange(min(2, len(self._jobs))))()

    def move(self) -> None:
        """Between two turns: jobs end, unless the store is slow."""
        stored = self.world.loop.stored
        assert stored is not None
        if self._jobs and not self._late and self._fault("store.slow"):
            self._late = self._rng.choice([1, 5, 40, 900])
        if self._blocks and self._fault("store.other_process", rarely=True):
            for block in self._rng.sample(list(self._blocks), len(self._blocks) // 2):
                del self._blocks[block]
        self._late = max(self._late - 1, 0)
        if not self._late:
            self._run(sum(self._rng.random() < SOME for _ in self._jobs))
        loads = [waiting.load for waiting in stored._waiting]
        if len(set(loads)) < len(loads):
            self.world.mark("one load for two")
        self._before = {waiting.admitted.request.request_id: waiting for waiting in stored._waiting}
        self.loading |= self._before.keys()

    def violations(self, now: float) -> list[str]:
        """Return what is wrong after a turn that began at `now`."""
        world, stored = self.world, self.world.loop.stored
        assert stored is not None
        found = []
        for request_id, before in self._before.items():
            if before in stored._waiting:
                if before.until <= now or before.load.num_right is not None:
                    found.append(f"I36: request {request_id} waits for blocks for too long")
            elif not world.is_alive(request_id):
                world.mark("stopped or timed out while loading")
            elif before.load.num_right is None:
                world.mark("a load is not waited for")
        for name, count in (("Store Saved Blocks", self._num_saved), ("Store Loaded Blocks", self._num_loaded)):
            if stored._figures[name] > count:
                found.append(f"I36: {name} is {stored._figures[name]}, and the store counted {count}")
        if stored._figures["Store Loaded Blocks"]:
            world.mark("blocks come from the store")
        if world.loop.failure is None and not stored._not_submitted and not self._jobs and not stored._ended \
                and world.loop.kv.cache.host._reserved:
            found.append("I36: host blocks are reserved, and nobody fills them")
        return found

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
