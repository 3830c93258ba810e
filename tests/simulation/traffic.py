"""The traffic of blocks between a simulated engine and a store or other engines: who waits for it, and the threads.

Whatever the threads, the store and the other engines do, no request may notice more than the time it takes.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from batch_manager.stores.stored_blocks import StoredBlocks, Waiting

if TYPE_CHECKING:
    from .world import SimulatedWorld

SOME = 0.6                # share of the jobs that end in a turn
LATE = (1, 5, 40, 900)    # turns in which threads do nothing


class SimulatedThreads:
    """Threads of the engine, whose jobs run when the world says. There are two, so that a job may end before the one
    that came before it.

    may_run   (job) -> whether its thread has what it would wait for
    """

    def __init__(self, world: "SimulatedWorld", rng: Random,
                 may_run: Callable[[Callable[[], None]], bool] = lambda job: True) -> None:
        self._world, self._rng, self._may_run = world, rng, may_run
        self.jobs: list[Callable[[], None]] = []
        self._late, self.is_closed = 0, False

    def submit(self, job: Callable[[], None]) -> None:
        self._world.check(not self.is_closed, "I36: the threads of the traffic have ended and get a job")
        self.jobs.append(job)

    def close(self, seconds: float = 0.0, late: Callable[[], None] = lambda: None) -> bool:
        self._run(len(self.jobs), at_the_end=True)
        self.is_closed = True
        return True

    def move(self, is_slow: Callable[[], bool]) -> None:
        """Between two turns: jobs end, unless the threads are slow."""
        if self.jobs and not self._late and is_slow():
            self._late = self._rng.choice(LATE)
        self._late = max(self._late - 1, 0)
        if not self._late:
            self._run(sum(self._rng.random() < SOME for _ in self.jobs))

    def _run(self, count: int, at_the_end: bool = False) -> None:
        for _ in range(count):
            place = self._rng.randrange(min(2, len(self.jobs)))
            if at_the_end or self._may_run(self.jobs[place]):
                self.jobs.pop(place)()


class Traffic:
    """Checks the traffic of a world.

    loading    ids of the requests that have waited for blocks
    """

    def __init__(self, world: "SimulatedWorld", stored: StoredBlocks) -> None:
        self._world, self._stored = world, stored
        self._before: dict[int, Waiting] = {}                        # what waited before the turn
        self.loading: set[int] = set()
        self._parts = [part for part in (world.store, world.transfers) if part is not None]
        for part in self._parts:
            part.watch(stored)
        stored._has_begun = True
        stored._open()                                               # for which a thread would take a real second

    def move(self) -> None:
        stored = self._stored
        for part in self._parts:
            part.move()
        loads = [waiting.load for waiting in stored._waiting]
        if len(set(loads)) < len(loads):
            self._world.mark("one load for two")
        self._before = {waiting.admitted.request.request_id: waiting for waiting in stored._waiting}
        self.loading |= self._before.keys()

    def violations(self, now: float) -> list[str]:
        """Return what is wrong after a turn that began at `now`."""
        world, stored, found = self._world, self._stored, []
        for request_id, before in self._before.items():
            if before in stored._waiting:
                if before.until <= now or before.load.num_right is not None:
                    found.append(f"I36: request {request_id} waits for blocks for too long")
            elif not world.is_alive(request_id):
                world.mark("stopped or timed out while loading")
            elif before.load.num_right is None:
                world.mark("a load is not waited for")
        held: set[int] = set()
        for part in self._parts:
            found += part.violations(now)
            held |= part.held_ids()
        reserved = world.loop.kv.cache.host._reserved
        if world.loop.failure is None and not held <= reserved:
            found.append("I36: a host block is held for another engine, and is not reserved")
        is_idle = not (stored._not_submitted or stored._ended) and not any(
            threads.jobs for part in self._parts for threads in part.all_threads)
        if world.loop.failure is None and is_idle and (held != reserved or stored._num_reserved_for_loads):
            found.append("I36: host blocks are reserved, and nobody fills or holds them")
        return found
