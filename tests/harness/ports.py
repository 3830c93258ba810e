"""Ports for servers that cannot take port 0."""

import contextlib
import random
import socket
from pathlib import Path

_given: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 that no program uses now, and that this process was not given before.

    The system gives ports of its own range to outgoing connections and to servers on port 0 at any moment, also
    while a test restarts its server. The port is therefore below this range.
    """
    first_of_the_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first_of_the_system // 2, first_of_the_system)
        if port not in _given:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port
