"""The worker: what other threads tell it, how it serves, how it is watched.

One thread per manager. It holds no reference to the manager, so that dropping the last one ends it.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any

from .contained_log import log
from .errors import BatchManagerError, DeviceLostError, InternalError, ManagerClosedError, is_a, type_name, where_raised
from .guard import Heartbeat
from .interpreter_exit import forget_worker
from .loop.generation_loop import GenerationLoop
from .one_shot_event import OneShotEvent

LOOPS_AROUND_THE_WORKER = 8    # exceptions in a row, a few bytecodes apart, that it survives
ATTEMPTS_TO_END = 20    # without a final response between them: a backend may be past closing


class WakeUp:
    """An event for one waiter that costs an idle worker half of what threading.Event does: no lock is made a wait.

    `set` never blocks, so a forked child may call it whatever the parent's worker was doing.
    """

    def __init__(self) -> None:
        self._set = threading.Lock()
        self._set.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):    # it is set already
            self._set.release()

    def wait_and_clear(self, seconds: float) -> None:
        self._set.acquire(timeout=seconds)


class WorkerControl:
    """What other threads tell the worker, and what the worker lets them see. Plain attributes; no lock is held."""

    def __init__(self, clock: Any, hang_warning_s: float) -> None:
        self.clock = clock
        self.hang_warning_s = hang_warning_s
        self.process_id = os.getpid()
        self.wake = WakeUp()
        self.stopped = OneShotEvent()
        self.interruption: BaseException | None = None
        self.attempts_to_end = 0
        self.finals_before = 0
        self.worker: threading.Thread | None = None
        self._claimed_by: dict[str, int] = {}
        self.draining = False
        self.aborting = False
        self.heartbeat = Heartbeat(clock.monotonic())
        self._looked_at = time.monotonic()
        self._frozen_s, self._frozen_in_beat = 0.0, self.heartbeat.since

    def is_hanging(self, seconds: float) -> bool:
        """Whether so many seconds without a heartbeat are too many. An idle worker sleeps as long as it was told to,
        and time in which the whole process stood still does not count."""
        if self.heartbeat.activity == "idle" or not 0 < self.hang_warning_s < seconds:
            return False
        frozen = self._frozen_s if self._frozen_in_beat == self.heartbeat.since else 0.0
        return self.hang_warning_s < seconds - frozen - self._unwatched_s()

    def look(self) -> None:
        """By the thread that watches, at least four times in `hang_warning_s`: where it comes late the process stood
        still, as after SIGSTOP, or when its virtual machine was suspended."""
        beat, unwatched = self.heartbeat.since, self._unwatched_s()
        self._looked_at = time.monotonic()
        if beat != self._frozen_in_beat:
            self._frozen_s, self._frozen_in_beat = 0.0, beat
        self._frozen_s += unwatched

    def _unwatched_s(self) -> float:
        late = time.monotonic() - self._looked_at - self.hang_warning_s / 4
        return late if late > self.hang_warning_s / 4 else 0.0

    def claim_the_loop(self) -> bool:
        """True for the thread that asked first: the worker's, or that of the constructor that failed. It closes it."""
        thread = threading.get_ident()
        return self._claimed_by.setdefault("thread", thread) == thread

    def ask_to_drain(self) -> None:
        self.draining = True
        self.wake.set()

    def ask_to_abort(self) -> None:
        self.draining = self.aborting = True
        self.wake.set()


def health_of(loop: GenerationLoop, control: WorkerControl, state: str | None = None) -> dict[str, Any]:
    """What `GptManager.health` says. Any thread may ask.

    state   what it is to be; None: what it is
    """
    activity, since = control.heartbeat.activity, control.heartbeat.since
    seconds = max(control.clock.monotonic() - since, 0.0)
    if state is None:
        state = _state_of(loop, control)
    alive = loop.intake.num_alive    # one reading: a request on its way from the queue is in neither place
    queued = min(len(loop.intake), alive)
    return {
        "state": state,
        "activity": activity,
        "seconds_in_activity": seconds,
        "is_hanging": state != "STOPPED" and control.is_hanging(seconds),
        "failure": "" if loop.failure is None else loop.failure.response_text(),
        "active_requests": alive - queued,
        "queued_requests": queued,
        "iterations": loop.iteration,
        "final_responses": loop.finals.num_sent,
        "errors": {code.value: count for code, count in loop.finals.errors.copy().items()},
        "callback_failures": dict(loop.callbacks.failures),
    }


def _state_of(loop: GenerationLoop, control: WorkerControl) -> str:
    if control.stopped.is_set:
        return "STOPPED"
    if loop.failure is not None:
        return "FAILED"
    return "DRAINING" if control.draining or loop.intake.is_terminating else "RUNNING"


def run_worker(loop: GenerationLoop, control: WorkerControl, idle_poll_interval_s: float,
               num_loops_inside: int = LOOPS_AROUND_THE_WORKER) -> None:
    """The worker: iterations until it is told to stop, then an answer for the requests that are left.

    Whatever is raised, by a step or by another thread in this one, the worker goes on from here: it fails the engine,
    which answers all requests, and comes back until none is left. The jump of a loop back to its `try` is outside of
    it. An exception right there, after another one, is caught by the next of these loops, which lie in each other.
    """
    while not control.stopped.is_set:
        try:
            if num_loops_inside:
                run_worker(loop, control, idle_poll_interval_s, num_loops_inside - 1)
            else:
                _go_on(loop, control, idle_poll_interval_s)
        except BaseException as error:
            control.interruption = error


def _go_on(loop: GenerationLoop, control: WorkerControl, idle_poll_interval_s: float) -> None:
    """Serve until told to stop, and end. Begins with what the exception that ended the last call left."""
    if not control.claim_the_loop():    # the constructor failed, and closes it
        control.wake.wait_and_clear(idle_poll_interval_s)
        return
    error, control.interruption = control.interruption, None
    if error is not None:
        log.critical("the engine failed with %s; every request is answered with ENGINE_FAILED until shutdown\n%s",
                     type_name(error), where_raised(error))
        if not control.aborting:
            control.wake.wait_and_clear(idle_poll_interval_s)    # what raises for ever must not keep a core busy
            loop.fail(_failure_of(error))
    while not _is_done(loop, control):
        if not loop.step(accept_new=not control.draining) and not _is_done(loop, control):
            control.heartbeat.beat("idle", control.clock.monotonic())
            control.wake.wait_and_clear(idle_poll_interval_s)
            control.heartbeat.beat("loop", control.clock.monotonic())

    if control.finals_before != loop.finals.num_sent:
        control.finals_before, control.attempts_to_end = loop.finals.num_sent, 0
    control.attempts_to_end += 1
    if control.attempts_to_end <= ATTEMPTS_TO_END:
        loop.answer_the_rest(_failure_of(error) if error is not None else ManagerClosedError(
            "the engine was shut down before the request was done", "what it generated so far is dropped",
            "send it to another instance"))
        loop.backend.close()
        loop.callbacks.at_end(lambda: health_of(loop, control, "STOPPED"))
    close_worker(control)


def _is_done(loop: GenerationLoop, control: WorkerControl) -> bool:
    return control.aborting or ((control.draining or loop.intake.is_terminating) and loop.is_empty)


def close_worker(control: WorkerControl) -> None:
    """The end, for all threads to see."""
    forget_worker(control)
    control.stopped.set()


def _failure_of(error: BaseException) -> BatchManagerError:
    """What all requests are told when a step raised what nothing inside contains: a lost device, or a bug."""
    if is_a(error, (DeviceLostError, InternalError)):
        return error
    return InternalError(f"the engine raised {type_name(error)}", "it cannot go on",
                         "shut the manager down, make a new one, and report the log")


def watch_worker(control: WorkerControl) -> None:
    """Say once, with all stacks, when the worker has been inside one thing for too long. Nothing is killed."""
    reported_beat = None
    control.look()
    while not control.stopped.wait(control.hang_warning_s / 4):
        control.look()
        beat_at = control.heartbeat.since
        seconds = control.clock.monotonic() - beat_at
        if control.is_hanging(seconds) and reported_beat != beat_at:
            reported_beat = beat_at
            stacks = "\n".join(f"thread {thread}:\n{''.join(traceback.format_stack(frame))}"
                               for thread, frame in sys._current_frames().items())
            log.error("no heartbeat of the worker for %.0f s; it is in: %s\n%s", seconds, control.heartbeat.activity,
                      stacks)
