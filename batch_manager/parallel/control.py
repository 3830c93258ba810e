"""The control plane of real processes: TCP sockets between rank 0 and the other ranks, and the threads that send beats.

Rank 0 listens, and publishes its port and a key of 128 bits through a Rendezvous. The other ranks connect, and show the
key in their first frame. The key keeps strays out, not an adversary: ranks belong on a private network.
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from hmac import compare_digest
from secrets import token_bytes
from typing import Protocol, TypeVar

from ..contained_log import log
from ..errors import ConfigError, counted
from ..one_shot_event import OneShotEvent
from ..thread_stack import start_with_enough_stack
from .channel import VERSION, Channel, Kind, LostError
from .leader import Leader
from .link import Link
from .ranks import Ranks

T = TypeVar("T")
KEY_BYTES = 16
RECEIVE_BYTES = 1 << 15          # more would be allocated anew at each call, by the kernel
SECONDS_TO_HELLO = 10.0          # for a connection to show the key
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_BETWEEN_TRIES = 0.05
_PORT = struct.Struct("<H")
# Until all ranks have come. A rank of an engine of another size, which may be constructed later, does not find it.
_ADDRESS = "control address of {} ranks"
WELCOME = "welcome"


class Rendezvous(Protocol):
    """Where rank 0 leaves what the other ranks need in order to find it."""

    def set(self, name: str, value: bytes) -> None: ...

    def get(self, name: str) -> bytes:
        """Wait for the value. Raises TimeoutError, or the error of the store, if it does not come."""
        ...

    def delete(self, name: str) -> None: ...


class SocketTransport:
    """A connected TCP socket as a channel.Transport."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def wait_to_send(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        poll.poll(seconds * 1000)

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._socket.close()


class WakeUpPipe:
    """Wakes the thread that waits for another rank. `set` never blocks, and does nothing once the pipe is closed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        try:
            self._writer.send(b"\0")
        except OSError:                                # full: the thread will wake; or closed
            return

    def clear(self) -> None:
        try:
            while len(self._reader.recv(4096)) == 4096:
                continue
        except OSError:
            return

    def wait_and_clear(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        poll.poll(seconds * 1000)
        self.clear()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class SocketWait:
    """Waits for bytes from other ranks; see Ranks. A wake-up ends the wait."""

    def __init__(self, transports: Mapping[int, SocketTransport], wake: WakeUpPipe | None = None) -> None:
        self._transports, self._wake = transports, wake
        self._all, self._rank_of = self._polled(transports)

    def _polled(self, ranks: Collection[int]) -> tuple[select.poll, dict[int, int]]:
        poll, rank_of = select.poll(), {self._transports[rank].fileno(): rank for rank in ranks}
        for descriptor in [*rank_of, *([self._wake.fileno()] if self._wake is not None else [])]:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        return poll, rank_of

    def __call__(self, seconds: float, ranks: Collection[int]) -> Collection[int]:
        poll = self._all if len(ranks) == len(self._transports) else self._polled(ranks)[0]
        ready = [descriptor for descriptor, _ in poll.poll(seconds * 1000)]
        if self._wake is not None and self._wake.fileno() in ready:
            self._wake.clear()
        return [self._rank_of[descriptor] for descriptor in ready if descriptor in self._rank_of]


class Beats:
    """The thread that calls `tick` of this process's ranks until `stop`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._stopped = OneShotEvent()
        self._thread = threading.Thread(target=self._run, name="batch_manager beats", daemon=True)
        start_with_enough_stack(self._thread)

    def _run(self) -> None:
        while not self._stopped.wait(self._ranks.beat_s):
            self._ranks.tick()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


# ---------------------------------------------------------------------- the start


def lead(rendezvous: Rendezvous, num_ranks: int, *, host: str, rank_timeout_s: float, connect_timeout_s: float,
         check: Callable[[], None] = lambda: None) -> Leader:
    """Wait for all other ranks, and return the Leader of rank 0.

    host    a name or an address of this machine, at which the other ranks reach it
    check   called again and again while waiting; may raise

    Raises ConfigError if a rank does not come in time, or if two processes have one rank.
    """
    key = token_bytes(KEY_BYTES)
    with _listening(host) as listener:
        address = _ADDRESS.format(num_ranks)
        rendezvous.set(address, _PORT.pack(listener.getsockname()[1]) + key)
        try:
            joined = _accept_all(listener, key, num_ranks, rank_timeout_s, connect_timeout_s, check)
        finally:
            rendezvous.delete(address)                 # the store may outlive this process, as torchrun's does
    transports = {rank: transport for rank, (transport, _) in sorted(joined.items())}
    leader = Leader({rank: channel for rank, (_, channel) in sorted(joined.items())}, SocketWait(transports),
                    rank_timeout_s)
    leader.before_close = Beats(leader).stop
    return leader


def join(rendezvous: Rendezvous, rank: int, num_ranks: int, *, host: str, rank_timeout_s: float,
         connect_timeout_s: float, check: Callable[[], None] = lambda: None) -> tuple[Link, WakeUpPipe]:
    """Connect to rank 0, and return the Link of this rank and the pipe that wakes its thread.

    Raises ConfigError if rank 0 does not come in time, or refuses this process.
    """
    deadline = time.monotonic() + connect_timeout_s
    try:
        address = rendezvous.get(_ADDRESS.format(num_ranks))
    except Exception as error:
        raise ConfigError(f"rank {rank} of {num_ranks} found no rank 0 at {host} within {connect_timeout_s:g} s",
                          "expected all ranks to start at about the same time",
                          "see the log of rank 0, or raise ParallelConfig.connect_timeout_s") from error
    (port,), key = _PORT.unpack_from(address), address[_PORT.size:]
    connection = _connected(host, port, rank, deadline, connect_timeout_s, check)
    transport, wake = SocketTransport(connection), WakeUpPipe()
    channel = Channel(transport, rank_timeout_s)
    link = Link(rank, num_ranks, channel, SocketWait({0: transport}, wake), rank_timeout_s)
    try:
        channel.trust()
        channel.send(Kind.HELLO, ("key", (rank, num_ranks, key)))
        while not (frames := channel.receive()):
            check()
            link.wait(SECONDS_BETWEEN_LOOKS)
        _, (phase, reason) = frames[0]
        if phase != WELCOME:
            raise LostError(f"refused rank {rank}: {reason}")
    except BaseException as error:
        transport.close()
        wake.close()
        if isinstance(error, LostError):
            raise ConfigError(f"rank 0 {error}", "all ranks start together",
                              "correct what it says, then start all ranks again") from error
        raise
    beats = Beats(link)
    link.before_close = beats.stop
    return link, wake


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches a host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def wait_for_listener(host: str, port: int, deadline: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until something listens at an address. Raises TimeoutError with the reason at the deadline."""
    while True:
        check()
        seconds = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(min(5.0, seconds), 0.1)).close()
            return
        except OSError as error:
            if seconds < 0:
                raise TimeoutError(error.strerror or type(error).__name__) from error
            time.sleep(SECONDS_BETWEEN_TRIES)


def within(seconds: float, make: Callable[[], T]) -> T:
    """Return make(). Raises its RuntimeError, or TimeoutError if it takes longer.

    torch waits without end for a listener that never answers. Its call then stays in a thread, which does not keep the
    process alive.
    """
    made: list[T] = []
    raised: list[RuntimeError] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="batch_manager meeting", daemon=True)
    start_with_enough_stack(thread)
    thread.join(seconds + 0.5)                         # torch says more if it gives up itself
    if raised:
        raise raised[0]
    if not made:
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    return made[0]


def _listening(host: str) -> socket.socket:
    for address in (host, ""):                         # a name may lead to an address that only others know
        try:
            return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            if not address:
                raise ConfigError(f"rank 0 can listen nowhere: {error.strerror}", "expected a free port",
                                  "see the limits of this machine") from error
    raise AssertionError


def _connected(host: str, port: int, rank: int, deadline: float, connect_timeout_s: float,
               check: Callable[[], None]) -> socket.socket:
    while True:
        check()
        try:
            return socket.create_connection((host, port), timeout=max(min(5.0, deadline - time.monotonic()), 0.1))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"rank {rank} cannot reach rank 0 at {host}:{port} within {connect_timeout_s:g} s "
                                  f"({error.strerror or type(error).__name__})", "expected a connection",
                                  "check the network between the machines, or ParallelConfig.leader") from error
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _accept_all(listener: socket.socket, key: bytes, num_ranks: int, rank_timeout_s: float,
                connect_timeout_s: float, check: Callable[[], None]) -> dict[int, tuple[SocketTransport, Channel]]:
    """Return rank -> its connection, once all have come. On an error, tell those that have come."""
    joined: dict[int, tuple[SocketTransport, Channel]] = {}
    strangers: dict[int, tuple[SocketTransport, Channel, float]] = {}
    deadline = time.monotonic() + connect_timeout_s
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        while len(joined) < num_ranks - 1:
            check()
            now = time.monotonic()
            if now > deadline:
                missing = [rank for rank in range(1, num_ranks) if rank not in joined]
                raise ConfigError(f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not come within "
                                  f"{connect_timeout_s:g} s", f"expected {counted(num_ranks, 'rank')}",
                                  "see the logs of these ranks, or raise ParallelConfig.connect_timeout_s")
            for descriptor, _ in poll.poll(SECONDS_BETWEEN_LOOKS * 1000):
                if descriptor == listener.fileno():
                    try:
                        transport = SocketTransport(listener.accept()[0])
                    except OSError:                    # it is gone already
                        continue
                    poll.register(transport.fileno(), select.POLLIN)
                    strangers[transport.fileno()] = transport, Channel(transport, rank_timeout_s), now
                elif descriptor in strangers:
                    transport, channel, _ = strangers[descriptor]
                    rank = _rank_of(channel, key)
                    if rank is None:
                        continue
                    poll.unregister(descriptor)
                    del strangers[descriptor]
                    if rank < 0:
                        transport.close()
                        continue
                    joined_before = joined.setdefault(rank, (transport, channel))
                    if joined_before[0] is not transport or not 0 < rank < num_ranks:
                        joined[num_ranks] = transport, channel            # to be told as well
                        raise ConfigError(f"two processes have rank {rank}" if 0 < rank < num_ranks else
                                          f"a process has rank {rank}", f"expected the ranks 0 to {num_ranks - 1}, "
                                          "each once", "correct the launcher, or ParallelConfig.rank")
                    if channel.version != VERSION:
                        raise ConfigError(f"rank {rank} speaks version {channel.version} of the frames, and rank 0 "
                                          f"version {VERSION}", "expected one version of the package on all ranks",
                                          "install the same version everywhere")
                    channel.trust()
                    channel.send(Kind.HELLO, (WELCOME, None))
            for descriptor, (transport, _, since) in list(strangers.items()):
                if now - since > SECONDS_TO_HELLO:
                    poll.unregister(descriptor)
                    del strangers[descriptor]
                    transport.close()
    except BaseException as error:
        for transport, channel in joined.values():
            try:
                channel.send(Kind.HELLO, ("failed", f"rank 0: {error}"))
            except LostError:
                continue
            finally:
                transport.close()
        raise
    finally:
        for transport, _, _ in strangers.values():
            transport.close()
    return joined


def _rank_of(channel: Channel, key: bytes) -> int | None:
    """The rank of a process that shows the key; -1 for a stranger; None if its first frame is not here yet."""
    try:
        frames = channel.receive()
    except LostError as loss:
        log.warning("a connection to rank 0 %s; it is closed", loss)
        return -1
    if not frames:
        return None
    try:
        (kind, (phase, (rank, _, shown))), = frames
        if kind is Kind.HELLO and phase == "key" and type(rank) is int and compare_digest(shown, key):
            return rank
    except (TypeError, ValueError):
        pass
    log.warning("a connection to rank 0 has shown another key than rank 0's; it is closed")
    return -1
