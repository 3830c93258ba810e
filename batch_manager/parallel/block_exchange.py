"""The exchange of blocks between two engines: a consumer sends FETCH, a producer BLOCK for each block, then END.

    FETCH   (ticket, fingerprint, first block, number of blocks)
    BLOCK   (key, content)
    END     the reason why fewer blocks came; "" for none

Frames are those of channel.py, with checksums. A ticket works once: an exchange that breaks is not repeated.
"""

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread
from typing import Any

from ..config import MAX_POSITION
from ..contained_log import log
from ..errors import ConfigError, type_name
from ..thread_stack import start_with_enough_stack
from .channel import Channel, Kind, LostError
from .control import SocketTransport, WakeUpPipe
from .wire import WireError

SECONDS_TO_ASK = 2.0             # for a connection to send its FETCH
SECONDS_WITHOUT_PROGRESS = 2.0   # of bytes that the other end does not take
SECONDS_TO_CONNECT = 2.0
SECONDS_BETWEEN_LOOKS = 0.1
MOST_CONNECTIONS = 64            # that are answered, and as many that have sent nothing yet
BYTES_BESIDES_CONTENT = 1024     # of a BLOCK, at most; and an END is shorter
LONGEST_REASON = 200

# (ticket, fingerprint, first block, number of blocks, send) -> the reason of END
Answer = Callable[[bytes, bytes, int, int, Callable[[bytes, bytes], None]], str]


class _Timed(SocketTransport):
    """A connection that ends at `deadline`, whatever the other end does."""

    deadline = 0.0

    def send(self, data: bytes) -> int:
        if time.monotonic() > self.deadline:
            raise TimeoutError
        return super().send(data)

    def frames(self, channel: Channel, is_closed: Callable[[], bool]) -> Iterator[tuple[Kind, Any]]:
        """Yield the frames that come. Raises LostError at the deadline, at the end of the connection, or if closed."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while True:
            yield from channel.receive()
            left = self.deadline - time.monotonic()
            if left <= 0 or is_closed():
                raise LostError("is too late" if left <= 0 else "is not waited for")
            poll.poll(min(left, SECONDS_BETWEEN_LOOKS) * 1000)


def fetch(address: tuple[str, int], ticket: bytes, fingerprint: bytes, first: int, keys: Sequence[bytes],
          buffers: Sequence[memoryview], deadline: float, is_closed: Callable[[], bool]) -> tuple[int, str]:
    """Use a ticket, and fill buffers with the blocks of these keys, the first of which is block `first` of the prompt.

    deadline    in seconds of time.monotonic()
    is_closed   whether to stop

    Returns how many leading buffers are filled and right, and why not more; "" if there is no reason.
    """
    filled = 0
    try:
        seconds = max(min(SECONDS_TO_CONNECT, deadline - time.monotonic()), 0.01)
        with socket.create_connection(address, timeout=seconds) as connection:
            transport = _Timed(connection)
            transport.deadline = deadline
            channel = Channel(transport, SECONDS_WITHOUT_PROGRESS)
            channel.most_payload = max(map(len, buffers), default=0) + BYTES_BESIDES_CONTENT
            channel.send(Kind.FETCH, (ticket, fingerprint, first, len(keys)))
            for kind, value in transport.frames(channel, is_closed):
                if kind is Kind.END:
                    return filled, value[:LONGEST_REASON] if type(value) is str else "sent a wrong END"
                key, content = _block(kind, value)
                if filled == len(keys) or key != keys[filled]:
                    return filled, "has the blocks of another prompt"
                if len(content) != len(buffers[filled]):
                    return filled, f"has blocks of {len(content):,} bytes, not {len(buffers[filled]):,}"
                buffers[filled][:] = content
                filled += 1
        raise AssertionError
    except (LostError, WireError) as error:
        return filled, str(error)
    except OSError as error:
        return filled, f"cannot be reached ({error.strerror or type_name(error)})"


def _block(kind: Kind, value: Any) -> tuple[bytes, bytes]:
    if kind is not Kind.BLOCK or type(value) is not tuple or [type(part) for part in value] != [bytes, bytes]:
        raise LostError(f"sent a wrong {kind.name}")
    return value


class BlockServer:
    """Listens for consumers.

    timeout_s   for one exchange
    port        where it listens

    Raises ConfigError if it cannot listen.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        try:
            self._listener = socket.create_server((host, port),
                                                  family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"KvTransferConfig.host is {host!r} and port is {port}",
                              f"no one can listen there: {error.strerror or type_name(error)}",
                              "pass an address of this machine and a free port, or port=0") from error
        self.port: int = self._listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._wake, self._is_closed = WakeUpPipe(), False
        self._connections: set[socket.socket] = set()
        self._acceptor: Thread | None = None

    def start(self, answer: Answer, submit: Callable[[Callable[[], None]], None]) -> None:
        """Accept consumers on a thread.

        answer   answers one of them; called on the threads of `submit`
        submit   has a thread run a job
        """
        self._listener.setblocking(False)
        self._acceptor = Thread(target=self._accept, args=(answer, submit), name="batch_manager blocks", daemon=True)
        start_with_enough_stack(self._acceptor)

    def close(self) -> None:
        """Accept no connection any more, and end all exchanges at their next frame. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.set()
        if self._acceptor is not None:
            self._acceptor.join()
        self._listener.close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:                            # closed already
                continue
        self._wake.close()

    def _accept(self, answer: Answer, submit: Callable[[Callable[[], None]], None]) -> None:
        """Accept connections, and submit each one when it has sent something, so that silent ones hold no thread."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        silent: dict[int, tuple[socket.socket, float]] = {}    # descriptor -> connection, until when; oldest first

        def take(descriptor: int) -> socket.socket:
            poll.unregister(descriptor)
            return silent.pop(descriptor)[0]

        while not self._is_closed:
            until = min((until for _, until in silent.values()), default=None)
            ready = poll.poll(None if until is None else max(until - time.monotonic(), 0.0) * 1000)
            for descriptor, _ in ready:
                if descriptor in silent:
                    connection = take(descriptor)
                    self._connections.add(connection)
                    submit(partial(self._serve, answer, connection))
                elif descriptor == self._listener.fileno() and (accepted := self._accepted()) is not None:
                    if len(silent) >= MOST_CONNECTIONS:
                        take(next(iter(silent))).close()
                    silent[accepted.fileno()] = accepted, time.monotonic() + SECONDS_TO_ASK
                    poll.register(accepted, select.POLLIN)
            now = time.monotonic()
            for descriptor in [descriptor for descriptor, (_, until) in silent.items() if until <= now]:
                take(descriptor).close()
        for connection, _ in silent.values():
            connection.close()

    def _accepted(self) -> socket.socket | None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:                       # for instance too many open files
            log.warning("a consumer could not be accepted: %s", error.strerror or type_name(error))
            self._wake.wait_and_clear(SECONDS_BETWEEN_LOOKS)
            return None
        if len(self._connections) >= MOST_CONNECTIONS:
            connection.close()
            return None
        return connection

    def _serve(self, answer: Answer, connection: socket.socket) -> None:
        try:
            transport = _Timed(connection)
            transport.deadline = time.monotonic() + SECONDS_TO_ASK
            channel = Channel(transport, SECONDS_WITHOUT_PROGRESS)
            kind, value = next(transport.frames(channel, lambda: self._is_closed))
            transport.deadline = time.monotonic() + self._timeout_s
            if kind is Kind.FETCH and _is_right(value):
                ticket, fingerprint, first, count = value
                channel.send(Kind.END, answer(ticket, fingerprint, first, count,
                                              lambda key, content: channel.send(Kind.BLOCK, (key, content))))
        except (LostError, WireError, OSError) as error:
            log.info("an exchange of blocks ended early: the other engine %s", error)
        except Exception as error:
            log.error("an exchange of blocks raised %s: %s", type_name(error), error)
        finally:
            self._connections.discard(connection)
            connection.close()


def _is_right(value: Any) -> bool:
    return (type(value) is tuple and [type(part) for part in value] == [bytes, bytes, int, int]
            and all(0 <= number <= MAX_POSITION for number in value[2:]))
