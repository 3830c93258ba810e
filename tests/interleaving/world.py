"""The objects of a scenario: managers on the scheduler, clients whose callbacks are yield points, and the rules.

`violations` lists each broken rule and each anomaly that the simulator's history checker finds.
"""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from batch_manager import GptManager, InferenceRequest, interpreter_exit
from batch_manager.gpt_manager import SECONDS_TO_STOP_AFTER_A_TIMEOUT
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness.client import Client
from tests.harness.world import make_manager, quiet_log
from tests.simulation.history import Closed, Handed, HistoryChecker, Other, Polled, Sent, scripted_oracle

from .doubles import Event, Thread, Threading
from .scheduler import Abandoned, Scheduler

VOCAB_SIZE, MAX_SEQ_LEN = 50, 16
MODEL = {"vocab_size": VOCAB_SIZE, "key": 0, "window": None, "sink": 0}


class InterleavedClient(Client):
    """The callbacks of one manager. Each callback begins and ends with a yield point, and feeds a history checker.

    pending      [(request id, tokens to generate)] of the requests that get has not returned yet
    ended        request id -> the errors of its finals so far
    control      the WorkerControl of the manager
    gives_all    whether get ignores max_num_requests and returns all pending requests
    num_polled   number of requests handed over before the last poll; the engine has accepted or refused all of them
    """

    has_stats = False

    def __init__(self, world: "InterleavedWorld", name: str) -> None:
        super().__init__()
        self._world, self.name = world, name
        self._scheduler, self._clock = world.scheduler, world.scheduler.clock
        self._checker = HistoryChecker(scripted_oracle(MODEL), MAX_SEQ_LEN)
        self._gets_after_the_end = 0
        self.ended: dict[int, list[str]] = {}
        self.handed_over: set[int] = set()
        self.control: Any = None
        self.gives_all = False
        self.num_polled = 0

    @property
    def open(self) -> set[int]:
        """The ids of requests that get returned and that have had no final response."""
        return self.handed_over - set(self.ended)

    def items(self, max_num_requests: int) -> list[InferenceRequest]:
        if self.control is not None and self.control.draining:
            self._gets_after_the_end += 1
            if self._gets_after_the_end > 1:    # the first call may have begun when the end was asked for
                self.wrong("get was called again although the end was asked for")
        count = len(self.pending)    # read once: real threads may append meanwhile
        if not self.gives_all:
            count = min(count, max_num_requests)
        taken, self.pending[:count] = self.pending[:count], []
        items = []
        for request_id, length in taken:
            items.append(InferenceRequest(request_id, {"input_ids": [1, 2], "request_output_len": length}))
            if request_id != self._world.terminate_req_id:
                self.handed_over.add(request_id)
                self._feed(Handed(self._now(), request_id, "", [1, 2], length))
        self._feed(Other(self._now()))
        return items

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        values = {named.name: np.asarray(named.tensor) for named in tensors}
        tokens = None
        if values:
            tokens = values["output_ids"][0, 0, :int(values["sequence_length"][0, 0])].tolist()
        reason = int(values["finish_reason"][0, 0]) if values else 0
        self._feed(Sent(self._now(), request_id, final, error, tokens, reason))
        if final:
            self.ended.setdefault(request_id, []).append(error)

    def named_stops(self) -> set[int]:
        self.num_polled = len(self.handed_over)
        stops = self.stops.copy()
        self._feed(Polled(self._now(), sorted(stops)))
        return stops

    def begins(self, name: str) -> None:
        super().begins(name)
        self._scheduler.point(f"{self.name} {name} begins")

    def ends(self, name: str) -> None:
        self._scheduler.point(f"{self.name} {name} ends")
        super().ends(name)

    def wrong(self, complaint: str) -> None:
        self._world.wrong(f"{self.name}: {complaint}")

    def close(self) -> None:
        """End the history of this manager, and report the anomalies that the history checker finds."""
        self._feed(Closed(self._now()))
        self._world.violations += [f"{self.name}: {anomaly}" for anomaly in self._checker.anomalies]

    def _now(self) -> float:
        return self._clock.monotonic()

    def _feed(self, event: object) -> None:
        self._checker.feed(event)


class InterleavedWorld:
    """The managers and clients of one run of a scenario, and the methods that its body calls.

    managers     name -> manager; a scenario clears this dictionary to drop the last references
    threading    the replacement of `threading`
    """

    def __init__(self, scheduler: Scheduler, threading: Threading) -> None:
        self.scheduler, self.threading = scheduler, threading
        self.managers: dict[str, GptManager] = {}
        self.clients: dict[str, InterleavedClient] = {}
        self.backends: list[ScriptedBackend] = []
        self.violations: list[str] = []
        self.terminate_req_id: int | None = None

    # ------------------------------------------------------------------ for scenarios

    def make(self, name: str = "a", *pending: tuple[int, int], **options: Any) -> InterleavedClient:
        """Make a manager whose idle worker wakes only every 30 s, unless a call wakes it earlier."""
        client = self.clients.get(name) or self.client(name)
        client.pending += pending
        params = {"max_batch_size": 2, "hang_warning_s": 0.0, "idle_poll_interval_s": 30.0, **options}
        backend = ScriptedBackend(vocab_size=VOCAB_SIZE, max_seq_len=MAX_SEQ_LEN, num_blocks=8, tokens_per_block=4,
                                  num_slots=4, on_step=lambda batch: self._step(backend))
        self.backends.append(backend)
        self.managers[name] = make_manager(client, backend=backend, parts={"clock": self.scheduler.clock},
                                           terminate_req_id=self.terminate_req_id, **params)
        client.control = self.managers[name]._control
        return client

    def make_busy(self, name: str, *pending: tuple[int, int], **options: Any) -> InterleavedClient:
        """Make a manager, and return after it called get for the first time."""
        client, has_taken = self.client(name), self.event()
        client.on_get = has_taken.set
        self.make(name, *pending, **options)
        has_taken.wait()
        return client

    def client(self, name: str) -> InterleavedClient:
        self.clients[name] = InterleavedClient(self, name)
        return self.clients[name]

    def spawn(self, name: str, function: Callable[[], None]) -> Thread:
        """Start a thread of the user that runs `function`."""
        thread = self.threading.Thread(target=function, name=name)
        thread.start()
        return thread

    def event(self) -> Event:
        return self.threading.Event()

    def shutdown(self, name: str = "a", *, drain: bool = True, timeout: float | None = None,
                 from_callback: bool = False, may_block: bool = False) -> bool:
        """Call shutdown of the manager `name`, check what the contract promises, and return the result of the call.

        may_block   whether a callback of the scenario may wait for the clock or for the calling thread
        """
        manager, scheduler = self.managers[name], self.scheduler
        forced_moves, started = scheduler.forced_moves, scheduler.clock.monotonic()
        result = manager.shutdown(drain=drain, timeout=timeout)
        if from_callback:
            if result:
                self.wrong(f"C14 {name}: shutdown returned True inside a callback")
            return result
        if result:
            self._has_ended(name, manager, "shutdown returned True")
        elif timeout is None or scheduler.clock.monotonic() < started + timeout + SECONDS_TO_STOP_AFTER_A_TIMEOUT:
            self.wrong(f"C14 {name}: shutdown gave up after {scheduler.clock.monotonic() - started} s")
        if scheduler.forced_moves != forced_moves and not may_block:
            self.wrong(f"{name}: shutdown had to wait for the clock: the worker was not woken")
        return result

    def wait_until_terminate(self, name: str = "a", timeout: float | None = None) -> bool:
        manager = self.managers[name]
        result = manager.wait_until_terminate(timeout)
        if result:
            self._has_ended(name, manager, "wait_until_terminate returned True")
        return result

    def interpreter_exit(self) -> None:
        """Do what the interpreter does at exit: run the package's exit handler, join threads, freeze daemon threads."""
        try:
            interpreter_exit._abort_all_workers()
        except Abandoned:
            raise
        except BaseException as error:
            self.wrong(f"C17: the hook at interpreter exit raised {type(error).__name__}: {error}")
        joined = 0
        while joined < len(self.threading.threads):
            thread = self.threading.threads[joined]
            joined += 1
            if not thread.daemon:
                thread.join()
        for thread in self.threading.threads:
            if thread.daemon and not thread.has_finished:
                thread.freeze()

    def _step(self, backend: ScriptedBackend) -> None:
        self.scheduler.point("step")
        if backend.closed:
            self.wrong("a step ran on a backend that was closed")

    def wrong(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)

    # ------------------------------------------------------------------ the rules

    def _has_ended(self, name: str, manager: GptManager, why: str) -> None:
        client = self.clients[name]
        client.over = why
        if not manager._worker.has_finished:
            self.wrong(f"C14 {name}: {why} and the worker is alive")
        if client.open:
            self.wrong(f"C14 {name}: {why} and {sorted(client.open)} have had no final")
        state = manager.health()["state"]
        if state != "STOPPED":
            self.wrong(f"{name}: {why} and health says {state}")
        watchdog = manager._watchdog
        if watchdog in self.threading.threads and not watchdog.has_finished:
            self.wrong(f"C23 {name}: {why} and the watchdog is alive")

    def close(self) -> None:
        """Check at the end of a run that nothing of the managers is left and that each history is complete."""
        for thread in self.threading.threads:
            if not thread.has_finished:
                self.wrong(f"C23: {thread.name} has not ended")
        if any(not backend.closed for backend in self.backends):
            self.wrong("C23: a backend was not closed")
        if len(interpreter_exit._controls):
            self.wrong("C23: a worker that is gone is still on the list of those to end")
        for client in self.clients.values():
            client.close()


def stop_all_workers() -> None:
    for control in interpreter_exit._controls:
        control.stopped.is_set = True


def run_once(scenario: Callable[[InterleavedWorld], None], scheduler: Scheduler, threading: Threading) -> list[str]:
    """Run a scenario once. Returns the violations."""
    world = InterleavedWorld(scheduler, threading)
    scheduler.when_abandoned = stop_all_workers
    gc_was_enabled = gc.isenabled()
    gc.disable()    # only the schedule decides where the collector runs
    try:
        with quiet_log():
            scheduler.run(lambda: scenario(world))
            if not scheduler.violations:
                world.close()
    finally:
        world.managers.clear()
        if gc_was_enabled:
            gc.enable()
    return scheduler.violations + world.violations
