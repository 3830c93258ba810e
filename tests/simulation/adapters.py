"""Adapters in the simulator: the contents of each task id, what an id names, and when checks are done.

`Adapters` wraps the engine's store. It keeps its own table of what each task id names, so that an engine that gives a
request the content of another time is found out. The tokens of the simulated device depend on what the pages hold.
"""

from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

from batch_manager.adapter_values import AdapterContent
from batch_manager.errors import AdapterNotCachedError
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.testing.scripted_tokens import mark_of, page_words
from tests.harness.scripted_adapters import adapter_tensors, content_of

from .faults import Faults, Place
from .history import Handed

if TYPE_CHECKING:
    from .world import SimulatedWorld

MORE_FAULTS = 4           # the chances of these faults are fewer than those of others


@cache
def made(task_id: int, version: int, largest: int) -> tuple[dict[str, Any], AdapterContent]:
    """Return the tensors and the content of a version of an adapter, of rank 1 to `largest`."""
    seed = 1000 * task_id + version
    tensors = adapter_tensors(seed, 1 + (task_id + version) % largest)
    return tensors, content_of(tensors)


class Adapters:
    """What the task ids of a world stand for. `names` has what the store must know: task id -> digest."""

    def __init__(self, world: "SimulatedWorld") -> None:
        swarm = world.swarm
        self.world, self.swarm = world, swarm
        self.faults = Faults(Random(f"adapter faults {swarm.seed}"), swarm.faults, MORE_FAULTS * swarm.fault_rate)
        self._rng = Random(f"adapters of {world.swarm.seed}")
        self._versions: dict[int, int] = {}
        self._contents: dict[bytes, AdapterContent] = {}
        self._own: dict[int, bytes] = {}                  # id of a request that brings an adapter -> its digest
        self.names: dict[int, bytes] = {}
        self.unordered: set[int] = set()                  # ids of requests that waited for an adapter
        self._jobs: list[Any] = []
        self._failing: set[int] = set()                   # steps in which a load has failed

    def watch(self, loop) -> None:
        """Wrap the store, and let checks run when `move` says."""
        preparing, store = loop.preparing, loop.adapters.store
        put, forget, find = store.put, store.forget, store.find
        preparing._helper, preparing._jobs = self, self

        def watched_put(task_id, content, *, keep=False):
            stored = put(task_id, content, keep=keep)
            self.world.check(stored.digest == content.digest, "I34: the store returned other content than it was given")
            self.names = {task: digest for task, digest in self.names.items() if digest in store._stored}
            self.names[task_id] = content.digest
            return stored

        def watched_forget(task_id):
            self.names.pop(task_id, None)
            return forget(task_id)

        def watched_find(task_id):
            try:
                content = find(task_id)
            except AdapterNotCachedError:
                self.world.check(task_id not in self.names, f"I34: task {task_id} was not found and is in the store")
                self.world.mark("an adapter is not in the cache")
                raise
            self.world.check(self.names.get(task_id) == content.digest, f"I34: task {task_id} has other content")
            return content

        store.put, store.forget, store.find = watched_put, watched_forget, watched_find

    # as the queue and the thread of Preparing

    def put(self, job: Any) -> None:
        if job is not None:
            self._jobs.append(job)

    def join(self) -> None:
        pass

    # what happens between turns

    def move(self) -> None:
        """Run the checks that wait, and forget an adapter, unless a fault is chosen."""
        fault = self.faults.draw(Place.ADAPTER)
        if fault == "adapter.check_late" and self._jobs:
            self.faults.hit(fault)
            return
        if fault == "adapter.forgotten" and self.names:
            task_id = self._rng.choice(sorted(self.names))
            digest = self.names[task_id]
            if any(request.adapter_digest == digest for request in self.world.loop.active):
                self.world.mark("an adapter is forgotten while it is in use")
            self.faults.hit(fault)
            self._versions[task_id] = self._versions.get(task_id, 0) + 1
            self.world.loop.adapters.store.forget(task_id)
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.run(self.world.loop.preparing.check)

    def load_fails(self, iteration: int) -> bool:
        """Whether the load of an adapter for this step fails now. The load works when the step is run again."""
        if iteration in self._failing or self.faults.draw(Place.ADAPTER) != "adapter.upload_fails":
            return False
        self._failing.add(iteration)
        self.faults.hit("adapter.upload_fails")
        return True

    # requests

    def ask(self, tensors: dict[str, Any], handed: Handed) -> None:
        """Give a request an adapter: its tensors, or its id alone."""
        rng = self._rng
        task_id = rng.randrange(self.swarm.adapters)
        tensors["lora_task_id"] = handed.lora_task_id = task_id
        version = self._versions.get(task_id, 0)
        if rng.random() < 0.6:
            if task_id in self.names and self.faults.draw(Place.ADAPTER) == "adapter.other_content":
                self.faults.hit("adapter.other_content")
                version += 1
            given, content = made(task_id, version, self.swarm.adapter_pages)
            tensors |= given
            self._contents[content.digest] = content
            handed.brings = content.digest.hex()

    def note_active(self, request: LlmRequest, handed: Handed) -> None:
        """Check the adapter that an active request has, and tell the oracle about it."""
        digest = request.adapter_digest
        if handed.lora_task_id is None:
            self.world.check(digest is None, f"I34: {request} has an adapter and asked for none")
        elif digest is None or (handed.brings or digest.hex()) != digest.hex() or digest not in self._contents:
            self.world.check(False, f"I34: {request} has another adapter than it asked for")
        else:
            handed.mark = mark_of(page_words(self._contents[digest]))
            self.world.mark("an adapter runs")
