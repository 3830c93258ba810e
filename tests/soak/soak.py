"""Runs the engines in rounds, in turn, and measures the process after each round, when all engines are idle."""

import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from batch_manager import GptManager
from batch_manager.kv.audit import audit
from tests.simulation.history import Closed

from .engines import ENGINES, Engine, HurriedClock, UnreliableModel, make_manager
from .footprint import fill_the_cache_of_numpy, handles, memory, reachable_objects, tracked_objects
from .server import Server

SECONDS_UNTIL_A_ROUND_IS_GIVEN_UP = 600.0
MOST_ANOMALIES = 5

Sample = dict[str, Any]


class Soaked:
    """A manager and its server, which run in rounds. It keeps the counts of the last idle point."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        rng = Random(f"soak {seed} {engine.name}")
        self.clock = HurriedClock()
        self.server = Server(engine, self.clock, rng)
        self.manager: GptManager = make_manager(engine, self.server, self.clock, Random(rng.random()))
        self.server.notify = self.manager.notify
        self._ledger_before = (0, 0, 0)

    @property
    def model(self) -> UnreliableModel:
        return self.manager._loop.backend.on_step

    def run_round(self, count: int) -> Sample:
        """Send `count` items and wait until the engine is idle. Returns the measurements and violations."""
        iterations, steps = self.manager._loop.iteration, self.manager._loop.backend.num_steps
        began = self._worker_seconds()
        self.server.begin(count)
        self.manager.notify()
        is_over = self.server.round_over.wait(SECONDS_UNTIL_A_ROUND_IS_GIVEN_UP)
        wrong = [] if is_over else [f"the round was not over after {SECONDS_UNTIL_A_ROUND_IS_GIVEN_UP:.0f} s"]
        deadline = time.monotonic() + 10
        while is_over and not self._is_idle():
            if time.monotonic() > deadline:
                wrong.append("the worker does not come to rest")
                break
            time.sleep(0.0005)
        sample = {
            "engine": self.engine.name,
            "items": count,
            "iterations": self.manager._loop.iteration - iterations,
            "steps": self.manager._loop.backend.num_steps - steps,
            "worker_s": self._worker_seconds() - began,
            "wrong": [*wrong, *self._wrong_at_idle()][:MOST_ANOMALIES],
        }
        self.server.begin(0)
        return sample

    def _is_idle(self) -> bool:
        return self.manager.num_active_requests == 0 and self.manager.health()["activity"] == "idle"

    def _worker_seconds(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.manager._worker.ident))

    def _wrong_at_idle(self) -> Iterator[str]:
        loop, server = self.manager._loop, self.server
        intake = loop.intake
        ledger = intake.num_accepted, intake.num_refused, intake.unaddressable
        server.history.feed(Closed(0.0, *(now - before for now, before in zip(ledger, self._ledger_before))))
        self._ledger_before = ledger
        yield from server.history.anomalies
        if loop.finals.num_sent != ledger[0] + ledger[1]:
            yield f"{loop.finals.num_sent} finals for {ledger[0]} accepted and {ledger[1]} refused requests"
        if sum(ledger) != server.counts["items"]:
            yield f"{sum(ledger)} items decided, {server.counts['items']} handed over"
        if loop.kv.used_blocks:
            yield f"I17: {loop.kv.used_blocks} blocks are held and nobody is alive"
        if loop.failure is not None or server.counts["errors ENGINE_FAILED"]:
            yield f"the engine failed: {loop.failure}; {server.counts['errors ENGINE_FAILED']} finals say so"
        if loop.callbacks.failures != {**dict.fromkeys(loop.callbacks.failures, 0), **server.failures}:
            yield f"failures counted: {loop.callbacks.failures}; that happened: {dict(server.failures)}"
        try:
            audit(loop.kv)
        except Exception as error:
            yield f"audit: {error}"

    def held(self) -> tuple[dict[str, int], int]:
        """Count what the manager keeps alive. Returns (number of objects by type, entries of all containers)."""
        server = self.server
        without = [server, server.clock, server.rng, self.model, logging.root, logging.getLogger("batch_manager")]
        return reachable_objects(self.manager, without)


def soak(seed: int, items: int, items_a_round: int, tell: Callable[[Sample], None],
         engines: tuple[Engine, ...] = ENGINES, seconds: float | None = None) -> None:
    """Run rounds of `items_a_round` items, the engines in turn, until `items` items are done or `seconds` have passed.

    tell   called with the measurements at each idle point and, at the end, with a summary, which has the key "summary"
    """
    fill_the_cache_of_numpy()
    handles_before = handles()
    deadline = None if seconds is None else time.monotonic() + seconds
    with quiet():
        everyone = [Soaked(engine, seed) for engine in engines]
        handed = turn = 0
        try:
            while handed < items and (deadline is None or time.monotonic() < deadline):
                one = everyone[turn % len(everyone)]
                sample = one.run_round(items_a_round)
                handed, turn = handed + items_a_round, turn + 1
                objects, entries = one.held()
                tell({**sample, "handed": handed, **memory(), **handles(), "objects": objects, "entries": entries,
                      "tracked": tracked_objects()})
        finally:
            for one in everyone:
                one.manager.shutdown(drain=False, timeout=30)
    tell({"summary": True, "seed": seed, "python": platform.python_version(), "cores": os.cpu_count(),
          "virtual_hours": round(sum(one.clock.ahead for one in everyone) / 3600, 2),
          "model_faults": sum(one.model.num_faults for one in everyone),
          "callback_faults": sum(sum(one.server.failures.values()) for one in everyone),
          "counts": dict(sum((one.server.counts for one in everyone), type(everyone[0].server.counts)())),
          "handles_before": handles_before, "handles_after": _settled(handles_before)})


def _settled(before: dict[str, int]) -> dict[str, int]:
    """Wait until the process has the threads and files of `before`, at most 10 s. Return the threads and files.

    Watchdog threads end some time after their managers.
    """
    deadline = time.monotonic() + 10
    while (after := handles()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return after


@contextmanager
def quiet() -> Iterator[None]:
    """Let the engine log its thousands of injected faults, but discard the output."""
    log, handler = logging.getLogger("batch_manager"), logging.NullHandler()
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
