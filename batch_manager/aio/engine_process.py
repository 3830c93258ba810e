"""An engine process, seen from the user's process: AsyncEngine uses EngineProcess in place of a GptManager."""

import contextlib
import json
import logging
import multiprocessing.spawn
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from _queue import Empty, SimpleQueue  # gevent replaces queue.SimpleQueue by a queue for greenlets
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from ..adapter_values import AdapterInfo
from ..arguments import EngineArguments, by_name, check_threads_are_real
from ..config import Parts
from ..engine_info import EngineInfo
from ..errors import BatchManagerError, ConfigError, ManagerClosedError, type_name
from ..guard import Guard
from ..interpreter_exit import forget_worker, is_a_worker, list_worker
from ..kv_events import KvEvent
from ..one_shot_event import OneShotEvent, check_drain, checked_timeout
from ..options import make_admission
from ..requests.inference_request import InferenceRequest
from ..thread_stack import start_with_enough_stack
from .messages import (
    Beat,
    Call,
    End,
    Ended,
    KvEvents,
    Logged,
    NotStarted,
    Record,
    Requests,
    Responses,
    Returned,
    Start,
    Started,
    Wire,
)
from .switchboard import CLOSED, Switchboard

SECONDS_TO_END = 10.0          # from the request to abort until the process is killed
SECONDS_TO_EXIT = 5.0          # from the end of the worker until the process is killed
SECONDS_BETWEEN_LOOKS = 1.0
BYTES_ON_THE_WAY = 1 << 20
_PROGRAM = ("import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
            "from batch_manager.aio.engine_program import main; main(int(sys.argv[1]))")
log = logging.getLogger("batch_manager")


class EngineProcess:
    """A GptManager in another process, with the methods of GptManager that AsyncEngine uses.

    One thread receives messages from the engine process and calls the user's hooks and statistics callback. Another
    thread sends messages. The engine process ends when the EngineProcess is garbage-collected, and when this process
    ends in any way. The engine process ignores SIGINT, SIGTERM and SIGHUP, which this process handles.
    """

    def __init__(self, switchboard: Switchboard, arguments: EngineArguments, parts: Parts,
                 stats: Callable[[str], None] | None) -> None:
        """Start the process and wait until its engine runs.

        parts, stats   as for GptManager, checked. Hooks and statistics callback run in this process
        Raises         the errors of the constructor of GptManager; ConfigError if an argument cannot be pickled
        """
        check_threads_are_real()
        self._process_id = os.getpid()
        params, parts_to_send = arguments.optional_params, replace(
            parts, after_responses=None, at_end=None, kv_events=None)
        _check_sendable({**by_name(arguments), "parts": parts_to_send})
        self._link = link = Link(switchboard, parts, stats, params.log_callback_errors)
        self._hang_warning_s = params.hang_warning_s
        try:
            registry = sys.modules.get("batch_manager.models.registry")      # its import takes torch
            link.wire.send(Start(arguments, parts_to_send, stats is not None, parts.kv_events is not None,
                                 log.getEffectiveLevel(), {} if registry is None else registry.registered_names()))
            answer = link.first_answer()
            if isinstance(answer, NotStarted):
                raise answer.error
            self._info, link.health = answer.info, answer.health
            # The engine process counts the blocks: it knows its cache.
            self._admission = make_admission(arguments, parts, answer.limits, lambda _: 0).for_other_threads()
            weakref.finalize(self, link.ask_to_abort).atexit = False
            list_worker(link)
            start_with_enough_stack(link.worker)
            start_with_enough_stack(link.sender)
        except BaseException:
            link.kill()
            forget_worker(link)
            raise

    @property
    def info(self) -> EngineInfo:
        """Vocabulary, lengths, blocks, device and end ids of the engine, as in GptManager.info."""
        return self._info

    def notify(self) -> None:
        """Wake the sending thread.

        Called when the Switchboard has requests, or ids of stopped requests, to send to the engine process.
        """
        self._check_process()
        self._link.work.set()

    def check(self, request: InferenceRequest) -> None:
        """See GptManager.check. A request larger than the KV cache passes, and the engine process refuses it."""
        self._check_process()
        self._admission.admit(request)

    def health(self) -> dict[str, Any]:
        """Return the latest GptManager.health of the engine process, with two additional values:

        engine_process_id    id of the engine process
        seconds_since_heard  seconds since the last message of the engine process; less than 1 while the process
                             responds, 0 after it has ended
        """
        self._check_process()
        link = self._link
        health, received_at = link.merged_health(), link.received_at
        if link.ended.is_set:
            return {**health, "engine_process_id": link.process.pid, "seconds_since_heard": 0.0}
        seconds = max(time.monotonic() - received_at, 0.0)
        is_silent = 0 < self._hang_warning_s < seconds
        return {**health, "is_hanging": health["is_hanging"] or is_silent,
                "engine_process_id": link.process.pid, "seconds_since_heard": seconds}

    def load_adapter(self, task_id: int, adapter: str | os.PathLike[str] | Mapping[str, Any]) -> AdapterInfo:
        """See GptManager.load_adapter."""
        info: AdapterInfo = self._called("load_adapter", task_id, adapter)
        return info

    def forget_adapter(self, task_id: int) -> bool:
        """See GptManager.forget_adapter."""
        was_known: bool = self._called("forget_adapter", task_id)
        return was_known

    def kv_snapshot(self) -> list[KvEvent]:
        """See GptManager.kv_snapshot."""
        events: list[KvEvent] = self._called("kv_snapshot")
        return events

    def _called(self, method: str, *arguments: Any) -> Any:
        """Call a method of the GptManager in the engine process. Returns its result or raises its exception.

        Raises ManagerClosedError if the process ends before.
        """
        self._check_process()
        _check_sendable({method: arguments})
        return self._link.call(method, arguments)

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        """End the engine, as GptManager.shutdown does, and end the engine's process.

        The process is killed if it has not ended 10 seconds after the timeout.
        """
        self._check_process()
        check_drain(drain)
        timeout = checked_timeout(timeout)
        link = self._link
        link.ask_to_end(End(drain, timeout))
        if is_a_worker(threading.current_thread()):
            return False
        if not link.join(timeout):
            link.ask_to_abort()
            link.join(None)
        return True

    def __enter__(self) -> "EngineProcess":
        self._check_process()
        if self._link.ended.is_set and self._link.is_closed:    # if it failed instead, its streams raise
            raise ManagerClosedError("this engine is closed", "a closed engine cannot be reopened", "start a new one")
        return self

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise ManagerClosedError("this process was forked from the one that started the engine",
                                     "an engine serves its parent process only", "start a new engine after forking")


class Link:
    """State of the two threads of an EngineProcess.

    A Link has no reference to the EngineProcess, which can therefore be garbage-collected.

    worker        receiving thread; runs the hooks and the statistics callback
    health        latest health message of the engine process
    received_at   time of the latest message of the engine process, in monotonic seconds
    work          set when there is something to send
    is_closed     whether this process has asked the engine process to end
    ended         set when the engine process has ended, all requests are answered and all hooks have returned
    """

    def __init__(self, switchboard: Switchboard, hooks: Parts, stats: Callable[[str], None] | None,
                 logs_texts: bool) -> None:
        self._switchboard, self._hooks, self._stats = switchboard, hooks, stats
        self._guard = Guard(logs_texts=logs_texts)
        self._in_stats, self._in_after_responses, self._in_at_end, self._in_kv_events, self._in_log = map(
            self._guard.containing, ("stats", "after_responses", "at_end", "kv_events", "log"))
        self.health: dict[str, Any] = {}
        self.received_at = time.monotonic()
        self.work, self.ended = threading.Event(), OneShotEvent()
        self._to_send: list[End | Call] = []
        self._numbers, self._answers = count(), dict[int, SimpleQueue[Returned]]()
        self.is_closed = False
        self._kill_at = float("inf")
        self._has_ended_message = False
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BYTES_ON_THE_WAY)
            self.process = subprocess.Popen(
                [os.fsdecode(multiprocessing.spawn.get_executable()), "-c", _PROGRAM, str(theirs.fileno()),
                 json.dumps([path or os.getcwd() for path in sys.path if isinstance(path, str)])],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        self.wire = Wire(Connection(ours.detach()))
        self._process_descriptor = os.pidfd_open(self.process.pid)
        self.worker = threading.Thread(target=self._receive_for_ever, name="batch_manager engine process receiver")
        self.sender = threading.Thread(target=self._send_for_ever, name="batch_manager engine process sender",
                                       daemon=True)

    # ---------------------------------------------------------------- from any thread

    def ask_to_end(self, end: End) -> None:
        """Ask the engine process to shut down, with the arguments in `end`. Never blocks."""
        self.is_closed = True
        self._to_send.append(end)
        self.work.set()

    def ask_to_abort(self) -> None:
        """Ask the engine process to abort. The process is killed if it still runs 10 seconds later. Never blocks."""
        self._kill_at = time.monotonic() + SECONDS_TO_END
        self.ask_to_end(End(drain=False, timeout=None))

    def merged_health(self) -> dict[str, Any]:
        """Return `health` with the numbers of failures of the callbacks and hooks that ran in this process."""
        health = self.health
        return {**health, "callback_failures": {**health["callback_failures"], **self._guard.failures}}

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Have the engine process call a method of its manager, and wait for the result."""
        number, answer = next(self._numbers), SimpleQueue[Returned]()
        self._answers[number] = answer
        self._to_send.append(Call(number, method, arguments))
        self.work.set()
        try:
            while True:
                with contextlib.suppress(Empty):
                    returned = answer.get(timeout=SECONDS_BETWEEN_LOOKS)
                    break
                if self.ended.is_set:
                    raise ManagerClosedError("the engine process has ended", "it carries out commands while it runs",
                                             "start a new engine")
        finally:
            del self._answers[number]
        if returned.error is not None:
            raise returned.error
        return returned.result

    def join(self, timeout: float | None) -> bool:
        """Wait until the engine process has ended, its requests are answered, and the receiving thread has ended.

        Returns False after the timeout, else True.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.ended.wait(min(SECONDS_BETWEEN_LOOKS, max(until - time.monotonic(), 0))):
            if time.monotonic() >= until:
                return False
        if self.worker is not threading.current_thread():
            self.worker.join()
        return True

    # ---------------------------------------------------------------- while the engine starts

    def first_answer(self) -> Started | NotStarted:
        """Wait until the engine runs or has failed to start, and return its answer.

        Log records that arrive meanwhile are passed to the loggers of this process.
        """
        while True:
            try:
                message = self._next_message()
            except (EOFError, OSError):
                return NotStarted(ConfigError(f"the engine process {self._how_it_ended()} while it loaded the model",
                                              "the model must load without ending the process",
                                              "see the output of the process on stderr"))
            if isinstance(message, Started | NotStarted):
                return message
            if message is not None:
                self._take(message)

    def kill(self) -> None:
        """Kill the process and close its descriptors."""
        self.process.kill()
        self.process.wait()
        self.wire.connection.close()
        os.close(self._process_descriptor)

    # ---------------------------------------------------------------- the receiver

    def _receive_for_ever(self) -> None:
        try:
            while True:
                message = self._next_message()
                if message is not None:
                    self._take(message)
                elif time.monotonic() > self._kill_at:
                    log.error("the engine process %d did not end within %.0f s; killing it", self.process.pid,
                              SECONDS_TO_END)
                    break
        except (EOFError, OSError):
            pass
        finally:
            self._finish()

    def _next_message(self) -> Any:
        """Return the next message, or None if no message comes within a second.

        Raises EOFError or OSError if the process has ended.
        """
        poller = select.poll()
        poller.register(self.wire.connection.fileno(), select.POLLIN)
        poller.register(self._process_descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(SECONDS_BETWEEN_LOOKS * 1000)}
        if self.wire.connection.fileno() in ready:
            message = self.wire.receive()
            self.received_at = time.monotonic()
            return message
        if ready:    # it has ended, but a forked child of either process keeps the connection open
            raise EOFError
        return None

    def _take(self, message: Any) -> None:
        switchboard = self._switchboard
        match message:
            case Responses(responses, health):
                for response in responses:
                    switchboard.deliver(*response)
                if health is not None:
                    self.health = health
                switchboard.after_responses()
                self._pass_stops_on()
                if self._hooks.after_responses is not None:
                    with self._in_after_responses:
                        self._hooks.after_responses()
            case Record(text):
                stats = self._stats
                assert stats is not None       # the engine process sends records only if there is a callback
                with self._in_stats:
                    stats(text)
            case KvEvents(events):
                hook = self._hooks.kv_events
                assert hook is not None        # as for records
                with self._in_kv_events:
                    hook(events)
            case Beat(health):
                self.health = health
                self._pass_stops_on()
            case Logged(attributes):
                with self._in_log:
                    logger = logging.getLogger(attributes["name"])
                    if logger.isEnabledFor(attributes["levelno"]):
                        logger.handle(logging.makeLogRecord(attributes))
            case Returned(number):
                if (answer := self._answers.get(number)) is not None:
                    answer.put(message)
            case Ended(health):
                self._has_ended_message, self.health = True, health

    def _pass_stops_on(self) -> None:
        """Wake the sending thread if requests must be stopped, such as those of dropped streams and closed event loops.

        A dropped stream cannot wake the thread itself, because its finalizer may run in a thread that holds the lock of
        `work`.
        """
        if self._switchboard.has_stops:
            self.work.set()

    def _finish(self) -> None:
        """Wait for the process to exit, and kill the process if it does not exit in time.

        Then end all remaining requests and call the hook `at_end`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_EXIT if self._has_ended_message else 0.5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        error: BatchManagerError = CLOSED
        if not self._has_ended_message and self._kill_at == float("inf"):
            error = BatchManagerError(f"the engine process {self._how_it_ended()}",
                                      "it should run until the engine is closed",
                                      "start a new engine, or send the request to another instance")
            log.error("%s; all open requests end with ENGINE_FAILED", error)
        is_failed = error is not CLOSED
        self.health = {**self.health, "state": "FAILED" if is_failed else "STOPPED", "is_hanging": False}
        if is_failed:
            self.health.update(failure=error.response_text(), active_requests=0, queued_requests=0)
        self._switchboard.end(error)
        if self._hooks.at_end is not None:
            with self._in_at_end:
                self._hooks.at_end(self.merged_health())
        self.wire.connection.close()
        os.close(self._process_descriptor)
        forget_worker(self)
        self.ended.set()
        self.work.set()                        # ends the sender

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_EXIT)
        code = self.process.poll()
        if code is None:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"

    # ---------------------------------------------------------------- the sender

    def _send_for_ever(self) -> None:
        switchboard = self._switchboard
        with contextlib.suppress(OSError):     # the engine process has ended; the receiver ends the requests
            while not self.ended.is_set:
                self.work.wait()
                self.work.clear()
                while self._to_send:
                    self.wire.send(self._to_send.pop(0))
                requests, stops = switchboard.get(-1), switchboard.poll()
                if requests or stops:
                    self.wire.send(Requests(requests, list(stops)))
                    self.work.set()            # `get` may have returned only a part


def _check_sendable(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:             # user objects can raise anything
            raise ConfigError(f"{name} cannot be sent to the engine process: pickling raised {type_name(error)}: "
                              f"{error}", "expected picklable values: classes and functions of importable modules",
                              "pass a class or a factory, or start the engine with process=False") from error
