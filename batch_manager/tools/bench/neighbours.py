"""Processes that keep cores busy while a benchmark runs."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Run `count` processes that compute without a pause, as other programs on the machine would."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
