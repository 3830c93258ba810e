"""The worker thread: its control by other threads, its main loop, and the watchdog.

Each manager has one worker. The worker holds no reference to the manager, so that dropping the manager ends it.
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

NESTED_WORKER_LOOPS = 8    # exceptions in a row, a few bytecodes apart, that the worker survives
ATTEMPTS_TO_END = 20    # attempts without a final response in between; some backends cannot be closed


class WakeUp:
    """An event for one waiter. A wait creates no lock, and costs half as much as a wait of threading.Event.

    `set` never blocks. A forked child may call it, whatever state the parent's worker was in.
    """

    def __init__(self) -> None:
        self._set = threading.Lock()
        self._set.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):    # already set
            self._set.release()

    def wait_and_clear(self, seconds: float) -> None:
        self._set.acquire(timeout=seconds)


class WorkerControl:
    """State shared by the worker and other threads, without locks: commands to the worker, and its heartbeat."""

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
        self.not_compiled = self.not_captured = ""         # as in EngineInfo
        self.absent: dict[str, str] = {}                   # likewise
        self.draining = False
        self.aborting = False
        self.heartbeat = Heartbeat(clock.monotonic())
        self._watched_at = time.monotonic()
        self._frozen_s, self._frozen_in_beat = 0.0, self.heartbeat.since

    def is_hanging(self, seconds: float) -> bool:
        """Whether `seconds` without a heartbeat exceed hang_warning_s. False for an idle worker.

        Time in which the whole process was suspended does not count.
        """
        if self.heartbeat.activity == "idle" or not 0 < self.hang_warning_s < seconds:
            return False
        frozen = self._frozen_s if self._frozen_in_beat == self.heartbeat.since else 0.0
        return self.hang_warning_s < seconds - frozen - self._unwatched_s()

    def note_watchdog(self) -> None:
        """Record that the watchdog runs. The watchdog calls this method every `hang_warning_s` / 4 seconds.

        A late call means that the process was suspended, for instance by SIGSTOP or with its virtual machine.
        """
        beat, unwatched = self.heartbeat.since, self._unwatched_s()
        self._watched_at = time.monotonic()
        if beat != self._frozen_in_beat:
            self._frozen_s, self._frozen_in_beat = 0.0, beat
        self._frozen_s += unwatched

    def _unwatched_s(self) -> float:
        late = time.monotonic() - self._watched_at - self.hang_warning_s / 4
        return late if late > self.hang_warning_s / 4 else 0.0

    def claim_the_loop(self) -> bool:
        """Return True in the first thread that calls this method, also in its later calls, and False in other threads.

        The first thread closes the loop. It is the worker or the thread of a constructor that fails.
        """
        thread = threading.get_ident()
        return self._claimed_by.setdefault("thread", thread) == thread

    def ask_to_drain(self) -> None:
        self.draining = True
        self.wake.set()

    def ask_to_abort(self) -> None:
        self.draining = self.aborting = True
        self.wake.set()


def health_of(loop: GenerationLoop, control: WorkerControl, state: str | None = None) -> dict[str, Any]:
    """The result of `GptManager.health`. Can be called from any thread.

    state   the state to report; None: the current state
    """
    activity, since = control.heartbeat.activity, control.heartbeat.since
    seconds = max(control.clock.monotonic() - since, 0.0)
    if state is None:
        state = _state_of(loop, control)
    alive = loop.intake.num_alive    # read once: a request that is leaving the queue is counted nowhere else
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
        "unaddressable_items": loop.intake.unaddressable,
        "callback_failures": dict(loop.callbacks.failures),
        "not_compiled": control.not_compiled,
        "not_captured": control.not_captured,
        "absent": dict(control.absent),
    }


def _state_of(loop: GenerationLoop, control: WorkerControl) -> str:
    if control.stopped.is_set:
        return "STOPPED"
    if loop.failure is not None:
        return "FAILED"
    return "DRAINING" if control.draining or loop.intake.is_terminating else "RUNNING"


def run_worker(loop: GenerationLoop, control: WorkerControl, idle_poll_interval_s: float,
               num_loops_inside: int = NESTED_WORKER_LOOPS) -> None:
    """The worker's main function: run iterations until the worker is stopped, then answer the requests that are left.

    If an exception ends `_serve`, this function calls `_serve` again. The exception can come from a step, or
    another thread can raise it in the worker. The next call of `_serve` fails the engine: all requests are answered
    with the error. Until the worker is stopped, later requests are answered as well.

    The function calls itself, so that its loops are nested. The `try` statement in a loop does not cover the jump
    from the `except` clause to the next round of the loop. If a second exception is raised during this jump, the
    enclosing loop catches it.

    num_loops_inside   number of calls of this function nested in this call; 0: this call runs `_serve`
    """
    while not control.stopped.is_set:
        try:
            if num_loops_inside:
                run_worker(loop, control, idle_poll_interval_s, num_loops_inside - 1)
            else:
                _serve(loop, control, idle_poll_interval_s)
        except BaseException as error:
            control.interruption = error


def _serve(loop: GenerationLoop, control: WorkerControl, idle_poll_interval_s: float) -> None:
    """Run iterations until the worker is stopped, then end the worker.

    If an exception ended the previous call of this function, this call first makes the engine fail with that
    exception.
    """
    if not control.claim_the_loop():    # the constructor failed, and closes the loop
        control.wake.wait_and_clear(idle_poll_interval_s)
        return
    error, control.interruption = control.interruption, None
    if error is not None:
        log.critical("the engine failed with %s; every request is answered with ENGINE_FAILED until shutdown\n%s",
                     type_name(error), where_raised(error))
        if not control.aborting:
            control.wake.wait_and_clear(idle_poll_interval_s)    # an endless series of exceptions must not spin
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
            "the engine was shut down before the request was done", "tokens that were not sent are dropped",
            "send the request to another instance; after tokens that were sent, batch_manager.resume continues it"))
        _close_backend(loop)
        loop.callbacks.at_end(lambda: health_of(loop, control, "STOPPED"))
    close_worker(control)


def _close_backend(loop: GenerationLoop) -> None:
    """Close the backend. An exception of a custom backend is counted and logged, and the worker ends all the same."""
    with loop.callbacks.guard.containing("close", kind="method of the backend"):
        loop.backend.close()


def _is_done(loop: GenerationLoop, control: WorkerControl) -> bool:
    return control.aborting or ((control.draining or loop.intake.is_terminating) and loop.is_empty)


def close_worker(control: WorkerControl) -> None:
    """Mark the worker as ended and wake the threads that wait for it."""
    forget_worker(control)
    control.stopped.set()


def _failure_of(error: BaseException) -> BatchManagerError:
    """The error with which all requests end after `error`, an exception that the loop does not handle.

    This is `error` itself if it is a DeviceLostError or an InternalError, otherwise an InternalError.
    """
    if is_a(error, (DeviceLostError, InternalError)):
        return error
    return InternalError(f"the engine raised {type_name(error)}", "it cannot go on",
                         "shut the manager down, make a new one, and report the log")


def watch_worker(control: WorkerControl) -> None:
    """Log an error, with the stacks of all threads, when the worker stays in one activity for too long.

    Each such activity is logged once. The watchdog ends no thread.
    """
    reported_beat = None
    control.note_watchdog()
    while not control.stopped.wait(control.hang_warning_s / 4):
        control.note_watchdog()
        beat_at = control.heartbeat.since
        seconds = control.clock.monotonic() - beat_at
        if control.is_hanging(seconds) and reported_beat != beat_at:
            reported_beat = beat_at
            stacks = "\n".join(f"thread {thread}:\n{''.join(traceback.format_stack(frame))}"
                               for thread, frame in sys._current_frames().items())
            log.error("no heartbeat of the worker for %.0f s; the worker's activity is %s; the stacks of all threads "
                      "are\n%s", seconds, control.heartbeat.activity, stacks)
