"""The process of the OpenAI server. Needs uvicorn: the extra `server`."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ...errors import ConfigError

SECONDS_BETWEEN_LOOKS = 0.05


class DrainingServer(uvicorn.Server):
    """A server that drains on SIGTERM: it refuses new requests with 503 while running requests continue.

    The server ends when no request is running, at the latest `drain_s` seconds after the signal. The port stays open
    while the server drains, so that a load balancer can query /health. Ctrl-C ends running requests immediately, and
    so does a second signal. A third signal ends the process without waiting for connections.

    keep_alive_s   seconds after which an idle connection is closed
    """

    def __init__(self, app: Starlette, host: str, port: int, drain_s: float, keep_alive_s: int) -> None:
        super().__init__(uvicorn.Config(app, host, port, access_log=False, timeout_graceful_shutdown=5,
                                        timeout_keep_alive=keep_alive_s))
        self.app, self.drain_s, self.draining, self.num_signals = app, drain_s, None, 0
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).addFilter(FewAlike())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.num_signals += self.started
        if self.num_signals in (1, 2):
            if self.draining is not None:
                self.draining.cancel()
            is_patient = self.num_signals == 1 and sig == signal.SIGTERM
            self.draining = asyncio.ensure_future(self.drain(self.drain_s if is_patient else 0))
        else:
            self.force_exit = self.started
            super().handle_exit(sig, frame)

    async def drain(self, seconds: float) -> None:
        service, deadline = self.app.state.service, time.monotonic() + seconds
        service.is_draining = True
        while service.engine.health()["active_requests"] and time.monotonic() < deadline:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        await service.engine.close(drain=False)      # ends remaining requests with SHUTDOWN
        self.should_exit = True


class FewAlike(logging.Filter):
    """A log filter that passes three warnings and errors of the same kind a minute, and drops the others.

    Clients cause some of these records: for example, asyncio writes thousands a second while the process has no free
    file descriptor for the next connection. A kind is the first line of the text before its arguments are inserted,
    and the type of the exception.

    monotonic   () -> time of a clock in seconds
    """

    MOST, SECONDS = 3, 60.0

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic, self._began = monotonic, monotonic()
        self._counts: Counter[object] = Counter()      # has as many kinds as the libraries write

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if (now := self._monotonic()) - self._began >= self.SECONDS:
            self._began = now
            self._counts.clear()
        kind = str(record.msg).partition("\n")[0], record.exc_info and record.exc_info[0]
        self._counts[kind] += 1
        if self._counts[kind] == self.MOST:
            record.msg = f"{record.msg}\n(further records like this are dropped for up to {self.SECONDS:.0f} s)"
        return self._counts[kind] <= self.MOST


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the process cannot listen on the port. Call it before the model is loaded."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, UnicodeError) as error:
        wrong = "--port" if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(f"cannot listen on {host}, port {port}", str(error), f"pass another {wrong}") from error


def run(app: Starlette, host: str, port: int, *, drain_s: float, keep_alive_s: int) -> int:
    """Serve until a signal ends the server, and return the exit status.

    0: a signal ended it; 1: the start failed; 2: the model or an option was refused
    """
    try:
        with contextlib.suppress(KeyboardInterrupt):     # raised by uvicorn after an orderly shutdown
            DrainingServer(app, host, port, drain_s, keep_alive_s).run()
    except SystemExit:                                   # uvicorn's status of a failed start is 3
        return 2 if getattr(app.state, "is_refused", False) else 1
    return 0
