"""Main program of an engine process: a GptManager whose callbacks send messages to the host process.

The host process is the one that started the engine process.
"""

import contextlib
import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from ..arguments import Callbacks, by_name
from ..errors import ConfigError, InvalidRequestError, type_name
from ..gpt_manager import GptManager
from ..kv_events import KvEvent
from ..names import FinishReason
from ..requests.inference_request import InferenceRequest
from ..responses.named_tensor import NamedTensor
from .mailbox import Wants, pieces
from .messages import (
    Beat,
    Call,
    End,
    Ended,
    KvEvents,
    Logged,
    NotStarted,
    PackedRequest,
    Record,
    Requests,
    Responses,
    Returned,
    Start,
    Started,
    Wire,
    unpacked,
)
from .switchboard import MOST_AT_ONCE

SECONDS_BETWEEN_BEATS = 0.25
LEFT_TO_THE_HOST = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NO_ERROR = ""


def main(descriptor: int) -> None:
    """Serve the host at the other end of the socket `descriptor`, until the host sends End or the host process ends."""
    os.set_inheritable(descriptor, False)
    # A service manager signals all processes of a service, but the host decides when its engine ends. Handlers, unlike
    # SIG_IGN, are not inherited by programs that this process starts.
    for number in LEFT_TO_THE_HOST:
        signal.signal(number, lambda *_: None)
    wire = Wire(Connection(descriptor))
    try:
        start: Start = wire.receive()
    except EOFError:
        return
    except Exception as error:    # unpickling user objects can raise anything
        wire.send(NotStarted(ConfigError(
            f"the engine process cannot read `parts`: unpickling raised {type_name(error)}: {error}",
            "expected classes and functions from modules that it can import, not from __main__",
            "move them into a module, or start the engine with process=False")))
        return
    exchange = Exchange(wire)
    logger = logging.getLogger()
    logger.addHandler(_ToHost(wire))
    logger.setLevel(start.log_level)
    threading.Thread(target=exchange.receive_for_ever, name="engine process receiver", daemon=True).start()
    try:
        manager = exchange.make_manager(start)
    except BaseException as error:
        wire.send(NotStarted(_sendable(error)))
        return
    wire.send(Started(manager.info, manager.health(), manager._loop.limits))
    manager.wait_until_terminate()


class Exchange:
    """Translates between the manager's callbacks and the host's messages.

    The worker calls the callbacks, and another thread receives the messages.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._manager: GptManager | None = None
        self._inbox: deque[PackedRequest] = deque()
        self._stops: deque[int] = deque()
        self._wants: dict[int, Wants] = {}     # of the requests in the engine
        self._outgoing: list[tuple[Any, ...]] = []

    def make_manager(self, start: Start) -> GptManager:
        """Create the manager. Raises the errors of the constructor of GptManager."""
        if start.models:
            from ..models.registry import register_names

            register_names(start.models)
        callbacks = Callbacks(self._get, self._send, self._poll, self._record if start.wants_stats else None)
        parts = replace(start.parts, after_responses=self._after_responses, at_end=self._at_end,
                        kv_events=self._kv_events if start.wants_kv_events else None)
        self._manager = GptManager(**by_name(start.arguments), **by_name(callbacks), parts=parts)
        return self._manager

    # ---------------------------------------------------------------- callbacks, on the worker's thread

    def _get(self, max_num_requests: int) -> list[InferenceRequest]:
        inbox = self._inbox
        requests: list[InferenceRequest] = []
        if not inbox:
            return requests
        stopped = set(self._stops.copy())
        while inbox and len(requests) < MOST_AT_ONCE:
            request_id, _ = waiting = inbox.popleft()
            if request_id in stopped:          # never runs
                self._outgoing.append((request_id, [], int(FinishReason.CANCELLED), None, _NO_ERROR))
                continue
            try:
                request = unpacked(waiting)
                self._wants[request_id] = Wants.of(request)
                requests.append(request)
            except InvalidRequestError as error:
                self._outgoing.append((request_id, [], 0, None, error.response_text()))
        if self._outgoing:
            self._after_responses()
        return requests

    def _send(self, request_id: int, tensors: list[NamedTensor], final: bool, error: str) -> None:
        wants = self._wants.pop(request_id) if final else self._wants[request_id]
        if error:
            self._outgoing.append((request_id, [], 0, None, error))
            return
        tokens, reason, kept = pieces(tensors, final, wants)
        self._outgoing.append((request_id, tokens, int(reason), kept, _NO_ERROR))

    def _poll(self) -> set[int]:
        stops = set()
        while self._stops:
            stops.add(self._stops.popleft())
        return stops

    def _after_responses(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._wire.send(Responses(outgoing, None if self._manager is None else self._manager.health()))

    def _record(self, json: str) -> None:
        self._wire.send(Record(json))

    def _kv_events(self, events: Sequence[KvEvent]) -> None:
        self._wire.send(KvEvents(events))

    def _at_end(self, health: dict[str, Any]) -> None:
        self._wire.send(Ended(health))

    # ---------------------------------------------------------------- messages, on the receiving thread

    def receive_for_ever(self) -> None:
        """Receive the host's messages, and send a Beat when no message comes for SECONDS_BETWEEN_BEATS.

        Ends this process when the host has ended: the connection is closed, or this process has another parent.
        """
        host = os.getppid()
        try:
            while os.getppid() == host:
                if self._wire.connection.poll(SECONDS_BETWEEN_BEATS):
                    self._take(self._wire.receive())
                elif self._manager is not None:
                    self._wire.send(Beat(self._manager.health()))
        except (EOFError, OSError):
            pass
        if self._manager is not None:
            self._manager.shutdown(drain=False, timeout=0)
        os._exit(1)

    def _take(self, message: Any) -> None:
        match message:
            case Requests(requests, stops):
                self._inbox.extend(requests)
                self._stops.extend(stops)
                if self._manager is not None:
                    self._manager.notify()
            case Call():
                threading.Thread(target=self._carry_out, args=(message,), name="engine process command",
                                 daemon=True).start()
            case End(drain, timeout):
                assert self._manager is not None    # the host sends End only after Started
                threading.Thread(target=self._manager.shutdown, args=(drain, timeout), name="engine process end",
                                 daemon=True).start()

    def _carry_out(self, call: Call) -> None:
        try:
            returned = Returned(call.number, getattr(self._manager, call.method)(*call.arguments), None)
        except Exception as error:
            returned = Returned(call.number, None, _sendable(error))
        with contextlib.suppress(OSError):     # the host has ended
            self._wire.send(returned)


class _ToHost(logging.Handler):
    """Sends log records to the log handlers of the process that started the engine."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:    # message and arguments do not match; reported on stderr, as by other handlers
            self.handleError(record)
            return
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
        attributes = {name: getattr(record, name) for name in (
            "name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created",
            "process", "threadName")}
        with contextlib.suppress(OSError):     # the host has ended
            self._wire.send(Logged({**attributes, "msg": message, "args": None, "exc_text": trace,
                                    "processName": "engine process"}))


def _sendable(error: BaseException) -> Exception:
    """Return the error if it survives pickling, otherwise a ConfigError that describes it."""
    with contextlib.suppress(Exception):       # user classes can raise anything
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return ConfigError(f"the engine process could not start: {type_name(error)}: {error}",
                       "GptManager must start in the engine process",
                       "fix the error, or start the engine with process=False to debug it")
