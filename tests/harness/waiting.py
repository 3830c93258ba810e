"""Waits of tests for what other threads and processes do. Each has a limit, so that no test hangs."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
SECONDS = 60.0                     # not reached on a busy machine either


def until(condition: Callable[[], Found], seconds: float = SECONDS) -> Found:
    """Call `condition` until its result is true, and return that. What becomes true must stay true.

    Raises AssertionError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still {found!r} after {seconds:.0f} s"
        time.sleep(0.0005)
    return found


def has_ended(process: int | str) -> bool:
    """Whether a process has ended, also if its parent does not ask for its status."""
    with contextlib.suppress(OSError):
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    return True
