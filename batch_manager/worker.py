"""The worker thread: its control by other threads, its main loop, and the watchdog.

Each manager has one worker. The worker holds no reference to the manager, so that dropping the manager ends it.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from .contained_log import log
from .errors import (
    BatchManagerError,
    DeviceLostError,
    InternalError,
    ManagerClosedError,
    forget_frames,
    is_a,
    type_name,
    where_raised,
)
from .guard import Heartbeat
from .interpreter_exit import control_of, forget_worker
from .one_shot_event import OneShotEvent
from .requests.inference_request import InferenceRequest

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_COMMANDS = 0.005    # of a worker that waits for another one
NESTED_WORKER_LOOPS = 8    # exceptions in a row, a few bytecodes apart, that the worker survives
ATTEMPTS_TO_END = 20    # attempts without a final response in between; some backends cannot be closed


class EngineLoop(Protocol):
    """What a worker runs: the GenerationLoop of an engine, or the Follower of a rank other than rank 0.

    The worker's thread calls all methods but `check` and `health`, which any thread may call.
    """

    def step(self, *, accept_new: bool) -> bool:
        """Run one iteration. Returns False if there was nothing to do, so that the worker may wait.

        accept_new   False: a shutdown was requested
        """
        ...

    def is_done(self, *, draining: bool, aborting: bool) -> bool:
        """Whether the worker may end.

        draining, aborting   whether a shutdown was requested, and one that drops requests
        """
        ...

    def fail(self, error: BatchManagerError) -> None:
        """Mark the engine as failed and answer every unanswered item. If this raises, the next call goes on."""
        ...

    def end(self, error: BatchManagerError, health: Callable[[], dict[str, Any]]) -> None:
        """Answer every unanswered item with `error`, close the backend, and call the hook at_end with `health()`.

        If this raises, the next call goes on.
        """
        ...

    def check(self, request: InferenceRequest) -> None:
        """See GptManager.check. Any thread may call it."""
        ...

    def health(self) -> dict[str, Any]:
        """The part of GptManager.health that the loop knows. `state` is "RUNNING", "DRAINING" or "FAILED"."""
        ...


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


Result = TypeVar("Result")


class Command(Generic[Result]):
    """A function that the worker calls between two iterations, for another thread."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._is_done = OneShotEvent()

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except Exception as error:
            self._error = error
        self._is_done.set()

    def result(self, control: "WorkerControl") -> Result:
        """Wait for the call and return its result, or raise its exception.

        A worker carries out its own commands meanwhile, because the other one may wait for it.

        Raises ManagerClosedError if the worker ends before.
        """
        own = control_of(threading.current_thread())
        seconds = SECONDS_BETWEEN_COMMANDS if isinstance(own, WorkerControl) else SECONDS_BETWEEN_LOOKS
        while not self._is_done.wait(seconds) and not control.stopped.is_set:
            if isinstance(own, WorkerControl):
                own.run_commands()
        if self._error is not None:
            raise self._error
        if not self._results:
            raise ManagerClosedError("the manager was shut down", "its worker carries out commands while it runs",
                                     "make a new manager")
        return self._results[0]


class WorkerControl:
    """State shared by the worker and other threads, without locks: commands to the worker, and its heartbeat."""

    def __init__(self, clock: Any, hang_warning_s: float) -> None:
        self.clock = clock
        self.hang_warning_s = hang_warning_s
        self.process_id = os.getpid()
        self.wake = WakeUp()
        self.stopped = OneShotEvent()
        self.interruption: BaseException | None = None
        self.commands: deque[Command[Any]] = deque()
        self.attempts_to_end = 0
        self.finals_before = 0
        self.worker: threading.Thread | None = None
        self._claimed_by: dict[str, int] = {}
        self.not_compiled = self.not_captured = ""         # as in EngineInfo
        self.absent: dict[str, str] = {}                   # likewise
        self.ranks: Any = None                             # parallel.leader.Leader or link.Link, if there are several
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

    def run_commands(self) -> None:
        """Carry out the commands of other threads. The worker calls this between two iterations, or in a callback."""
        while self.commands:
            self.commands[0].run()    # removed afterwards: an exception between the two must not lose it
            self.commands.popleft()

    def claim_the_loop(self) -> bool:
        """Return True in the first thread that calls this method, also in its later calls, and False in other threads.

        The first thread closes the loop. It is the worker or the thread of a constructor that fails.
        """
        thread = threading.get_ident()
        return self._claimed_by.setdefault("thread", thread) == thread

    def listen_to(self, ranks: Any) -> None:
        """Wake the worker when another rank is lost or ends, and pass on its wish to end. None: there is one rank."""
        self.ranks = ranks
        if ranks is not None:
            ranks.on_change = self.wake.set
            ranks.on_end = lambda drain: self.ask_to_drain() if drain else self.ask_to_abort()
            if ranks.end_asked is not None:                # before it could be passed on
                ranks.on_end(ranks.end_asked)

    def ask_to_drain(self) -> None:
        self.draining = True
        self.wake.set()

    def ask_to_abort(self) -> None:
        self.draining = self.aborting = True
        self.wake.set()


def health_of(loop: EngineLoop, control: WorkerControl, state: str | None = None) -> dict[str, Any]:
    """The result of `GptManager.health`. Can be called from any thread.

    state   the state to report; None: the current state
    """
    activity, since = control.heartbeat.activity, control.heartbeat.since
    seconds = max(control.clock.monotonic() - since, 0.0)
    of_loop = loop.health()
    if state is None:
        state = ("STOPPED" if control.stopped.is_set else "DRAINING" if control.draining and
                 of_loop["state"] == "RUNNING" else of_loop["state"])
    return {
        "state": state,
        "activity": activity,
        "seconds_in_activity": seconds,
        "is_hanging": state != "STOPPED" and control.is_hanging(seconds),
        **{name: value for name, value in of_loop.items() if name != "state"},
        "not_compiled": control.not_compiled,
        "not_captured": control.not_captured,
        "absent": dict(control.absent),
        "ranks": {} if control.ranks is None else control.ranks.health(),
    }


def run_worker(loop: EngineLoop, control: WorkerControl, idle_poll_interval_s: float,
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


def _serve(loop: EngineLoop, control: WorkerControl, idle_poll_interval_s: float) -> None:
    """Run iterations until the worker is stopped, then end the worker.

    If an exception ended the previous call of this function, this call first makes the engine fail with that
    exception.
    """
    if not control.claim_the_loop():    # the constructor failed, and closes the loop
        control.wake.wait_and_clear(idle_poll_interval_s)
        return
    failure = None
    if control.interruption is not None:
        error, failure = control.interruption, _failure_of(control.interruption)
        log.critical("the engine failed with %s; every request is answered with ENGINE_FAILED until shutdown\n%s",
                     type_name(error), where_raised(error))
        forget_frames(error)    # a rank closes its connections, also those that its exchanges had
        control.interruption = None
        del error
        if not control.aborting:
            control.wake.wait_and_clear(idle_poll_interval_s)    # an endless series of exceptions must not spin
            loop.fail(failure)
    while not _is_done(loop, control):
        control.run_commands()
        if not loop.step(accept_new=not control.draining) and not _is_done(loop, control):
            control.heartbeat.beat("idle", control.clock.monotonic())
            control.wake.wait_and_clear(idle_poll_interval_s)
            control.heartbeat.beat("loop", control.clock.monotonic())

    finals = loop.health()["final_responses"]
    if control.finals_before != finals:
        control.finals_before, control.attempts_to_end = finals, 0
    control.attempts_to_end += 1
    if control.attempts_to_end <= ATTEMPTS_TO_END:
        loop.end(failure if failure is not None else ManagerClosedError(
            "the engine was shut down before the request was done", "tokens that were not sent are dropped",
            "send the request to another instance; after tokens that were sent, batch_manager.resume continues it"),
            lambda: health_of(loop, control, "STOPPED"))
    close_worker(control)


def _is_done(loop: EngineLoop, control: WorkerControl) -> bool:
    return loop.is_done(draining=control.draining, aborting=control.aborting)


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
