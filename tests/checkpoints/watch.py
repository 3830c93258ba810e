"""Observes the reading of a checkpoint: forbidden actions, leftover threads and files, memory and CPU time.

Reading may only list the checkpoint's folder and open its files.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from batch_manager.weights import safetensors_source

CPU_SECONDS, MEBIBYTES = 3.0, 64
READING = {"open"}                    # the only audited event allowed besides listing the folder


@dataclass(slots=True)
class _Armed:
    folder: str | None = None
    thread: int = 0
    deeds: list[str] = field(default_factory=list)


_armed, _hooked = _Armed(), False


def _hook(event: str, arguments: tuple) -> None:
    if _armed.folder is None or threading.get_ident() != _armed.thread:
        return
    if event == "os.listdir" and arguments == (_armed.folder,):
        return
    if event in READING:
        path, mode, flags = arguments
        path = os.fsdecode(path) if isinstance(path, str | bytes) else repr(path)
        inside = os.path.dirname(path) == _armed.folder and not os.path.islink(path)
        if inside and mode in ("r", "rb") and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
    _armed.deeds.append(f"{event} {arguments!r:.200}")


@contextmanager
def audited(folder: Path) -> Iterator[list[str]]:
    """Yield a list that grows by a description of each forbidden action of this thread within the context.

    Allowed are listing the folder and reading its regular files. `folder` must be a resolved path.

    The actions are audit events of Python. The audit hook cannot be removed, and does nothing outside the context. The
    safetensors library opens its file without an audit event, so this function audits the call of the library.
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    real = safetensors_source.safe_open

    def safe_open(path, **options):
        sys.audit("open", str(path), "rb", os.O_RDONLY)
        return real(path, **options)

    deeds: list[str] = []
    _armed.deeds, _armed.thread = deeds, threading.get_ident()
    safetensors_source.safe_open = safe_open
    _armed.folder = str(folder)
    try:
        yield deeds
    finally:
        _armed.folder = None
        safetensors_source.safe_open = real


@dataclass(frozen=True, slots=True)
class Resources:
    """Threads, open files and memory of the process.

    resident   bytes of memory in use
    peak       the most bytes of memory in use since `forget_peak`
    """

    threads: int
    files: int
    resident: int
    peak: int

    @staticmethod
    def now() -> "Resources":
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return Resources(int(lines["Threads"]), len(os.listdir("/proc/self/fd")),
                         int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024)


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def differences(before: Resources, after: Resources, file_bytes: int) -> list[str]:
    """Describe threads and open files left by reading `file_bytes` bytes of files, and excess memory."""
    wrong = []
    if after.threads != before.threads:
        wrong.append(f"{after.threads - before.threads:+} threads")
    if after.files != before.files:
        wrong.append(f"{after.files - before.files:+} open files")
    over = after.peak - before.resident - file_bytes
    if over > MEBIBYTES * 2**20:
        wrong.append(f"{over / 2**20:.0f} MiB of memory beyond the {file_bytes:,} bytes of the files")
    return wrong


class Stopwatch:
    """Measures the CPU time of this thread, on which other load of the machine has no effect."""

    def __init__(self) -> None:
        self._started = time.thread_time()

    def too_long(self) -> list[str]:
        seconds = time.thread_time() - self._started
        return [f"{seconds:.1f} s"] if seconds > CPU_SECONDS else []
