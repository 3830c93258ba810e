"""Planted concurrency bugs, each with the scenario that finds it. Bugs that the engine once had are marked.

A plant is a function that takes pytest's `monkeypatch` and breaks the manager's modules or their `threading`.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from batch_manager import gpt_manager, interpreter_exit, worker
from batch_manager.gpt_manager import GptManager
from batch_manager.loop.generation_loop import GenerationLoop
from batch_manager.worker import WorkerControl

from .doubles import Thread, Threading
from .scheduler import Abandoned


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug and the scenario that finds it, in a schedule with `preemptions` preemptions."""

    break_it: Callable[[pytest.MonkeyPatch], None]
    scenario: str
    preemptions: int = 0


def nobody_takes_the_lock(patch) -> None:
    """The worker and the failed constructor both close the loop."""
    patch.setattr(WorkerControl, "claim_the_loop", lambda self: True)


def woken_before_the_state_has_changed(patch) -> None:
    def ask_to_abort(self) -> None:
        self.wake.set()
        self.draining = self.aborting = True
    patch.setattr(WorkerControl, "ask_to_abort", ask_to_abort)


def a_wait_forgets_that_it_was_woken(patch) -> None:
    def wait_and_clear(self, seconds: float) -> None:
        self._set.acquire(blocking=False)
        self._set.acquire(timeout=seconds)
    patch.setattr(worker.WakeUp, "wait_and_clear", wait_and_clear)


def shutdown_does_not_wait_for_the_last_callback(patch) -> None:
    close = GptManager._join

    def join(self, timeout: float | None) -> bool:
        return self._loop.is_empty or close(self, timeout)
    patch.setattr(GptManager, "_join", join)


def the_end_is_announced_before_it_has_come(patch) -> None:
    ask = WorkerControl.ask_to_abort

    def ask_to_abort(self) -> None:
        ask(self)
        self.stopped.set()
    patch.setattr(WorkerControl, "ask_to_abort", ask_to_abort)
    patch.setattr(GptManager, "_join",
                  lambda self, timeout: self._control.stopped.wait(1e6 if timeout is None else timeout))


def with_finaliser(patch, finaliser: Callable[[GptManager, WorkerControl], Callable[[], None]]) -> None:
    """Replace the function that runs when a manager is garbage-collected by `finaliser(manager, control)`'s result."""
    def finalize(manager: GptManager, ask_to_abort: Callable[[], None]) -> weakref.finalize:
        return weakref.finalize(manager, finaliser(manager, ask_to_abort.__self__))
    patch.setattr(gpt_manager, "weakref", SimpleNamespace(finalize=finalize))


def the_finaliser_joins_the_worker(patch) -> None:
    def finaliser(manager: GptManager, control: WorkerControl) -> Callable[[], None]:
        def end() -> None:
            control.ask_to_abort()
            with suppress(RuntimeError):    # the interpreter only prints exceptions of finalisers
                control.worker.join()
        return end
    with_finaliser(patch, finaliser)


def the_finaliser_waits_for_the_worker(patch) -> None:
    def finaliser(manager: GptManager, control: WorkerControl) -> Callable[[], None]:
        def end() -> None:
            control.ask_to_abort()
            with suppress(Abandoned):
                control.stopped._held_until_set.acquire()
        return end
    with_finaliser(patch, finaliser)


def the_worker_keeps_the_manager_alive(patch) -> None:
    def finaliser(manager: GptManager, control: WorkerControl) -> Callable[[], None]:
        control.manager = manager
        return control.ask_to_abort
    with_finaliser(patch, finaliser)


def the_worker_is_a_daemon(patch) -> None:
    make = Threading.Thread

    def thread(self, *arguments, **options) -> Thread:
        return make(self, *arguments, **{**options, "daemon": True})
    patch.setattr(Threading, "Thread", thread)


def nobody_is_told_that_the_interpreter_ends(patch) -> None:
    patch.setattr(interpreter_exit, "_abort_all_workers", lambda: None)


# Bugs that the product once had.


class _WeakList(weakref.WeakKeyDictionary):
    """A list of workers that is copied by a Python loop. Another thread can change the list during the copy."""


def the_list_of_workers_changes_while_it_is_read(patch) -> None:
    patch.setattr(interpreter_exit, "_controls", _WeakList())


def a_worker_starts_when_nobody_will_tell_it_to_end(patch) -> None:
    def put(control: WorkerControl) -> None:
        interpreter_exit._controls[control] = None
    patch.setattr(gpt_manager, "list_worker", put)


def a_request_on_its_way_from_the_queue_is_not_counted(patch) -> None:
    patch.setattr(GptManager, "num_active_requests",
                  property(lambda self: len(self._loop.active) + len(self._loop.intake)))


def an_idle_worker_waits_although_it_is_to_end(patch) -> None:
    def is_done(loop, control) -> bool:
        if control.has_just_stepped:
            control.has_just_stepped = False
            return False
        return whole(loop, control)

    def step_noted(self, *, accept_new: bool) -> bool:
        self.backend_control.has_just_stepped = True
        return step(self, accept_new=accept_new)
    whole, step = worker._is_done, GenerationLoop.step
    run = worker.run_worker

    def run_noted(loop, control, seconds: float) -> None:
        loop.backend_control, control.has_just_stepped = control, False
        run(loop, control, seconds)
    patch.setattr(gpt_manager, "run_worker", run_noted)
    patch.setattr(worker, "_is_done", is_done)
    patch.setattr(GenerationLoop, "step", step_noted)


def a_callback_waits_for_the_other_manager(patch) -> None:
    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        self._control.ask_to_drain() if drain else self._control.ask_to_abort()
        return gpt_manager.threading.current_thread() is not self._worker and self._join(timeout)
    patch.setattr(GptManager, "shutdown", shutdown)


def shutdown_leaves_the_watchdog(patch) -> None:
    def join(self, timeout: float | None) -> bool:
        self._worker.join(timeout)
        return not self._worker.is_alive()
    patch.setattr(GptManager, "_join", join)


PLANTS: dict[str, Plant] = {plant.break_it.__name__: plant for plant in [
    Plant(nobody_takes_the_lock, "an_interrupt_comes_when_the_worker_has_started", 2),
    Plant(woken_before_the_state_has_changed, "two_threads_notify", 1),
    Plant(a_wait_forgets_that_it_was_woken, "a_notified_worker_fetches_at_once", 1),
    Plant(shutdown_does_not_wait_for_the_last_callback, "two_threads_drain", 1),
    Plant(the_end_is_announced_before_it_has_come, "one_drains_and_one_aborts"),
    Plant(the_finaliser_joins_the_worker, "the_worker_drops_the_last_reference"),
    Plant(the_finaliser_waits_for_the_worker, "the_collector_finds_it_on_any_thread", 1),
    Plant(the_worker_keeps_the_manager_alive, "another_thread_drops_the_last_reference"),
    Plant(the_worker_is_a_daemon, "the_interpreter_ends"),
    Plant(nobody_is_told_that_the_interpreter_ends, "the_interpreter_ends"),
    Plant(the_list_of_workers_changes_while_it_is_read, "the_list_of_workers_is_read/lines", 1),
    Plant(a_worker_starts_when_nobody_will_tell_it_to_end,
          "the_interpreter_ends_while_another_thread_makes_a_manager", 0),
    Plant(a_request_on_its_way_from_the_queue_is_not_counted, "readers_count_requests/lines", 1),
    Plant(an_idle_worker_waits_although_it_is_to_end, "everybody_waits_for_the_terminate_request"),
    Plant(a_callback_waits_for_the_other_manager, "two_managers_end_each_other"),
    Plant(shutdown_leaves_the_watchdog, "the_watchdog_watches"),
]}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Within the context, plant the bug `name`. None plants no bug."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            PLANTS[name].break_it(patch)
        yield
