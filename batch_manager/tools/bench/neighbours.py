"""Processes that keep cores busy while a benchmark runs."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Within it, so many other processes compute without a pause, as programs that share the machine would."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
