"""Statistics as a file of JSON lines that is bounded in size.

    with JsonlStatistics("statistics.jsonl") as statistics:
        manager = GptManager(..., return_batch_manager_stats_cb=statistics)
"""

import os
import time
from typing import Self

__all__ = ["JsonlStatistics"]

SECONDS_BETWEEN_FLUSHES = 1.0
IDLE = '"Active Request Count":0,'    # no further record need follow, and a reader of the file should know


class JsonlStatistics:
    """A statistics callback that appends each record to a file, as one line.

    path         of the file; lines that are there already stay
    max_bytes    at which the file becomes `path.1`, the one of that name `path.2`, and so on
    num_kept     so many of those are kept

    Lines reach the file once a second, with the record of an idle engine, and at `close`. What cannot be written, as on
    a full disk, raises OSError in the callback, which the engine counts and logs; the next record is tried again. One
    thread at a time calls it.
    """

    def __init__(self, path: str | os.PathLike, *, max_bytes: int = 64 << 20, num_kept: int = 3) -> None:
        if max_bytes < 1 or num_kept < 0:
            raise ValueError(f"max_bytes is {max_bytes} and num_kept is {num_kept}; at least 1 and at least 0")
        self._path, self._max_bytes, self._num_kept = os.fspath(path), max_bytes, num_kept
        self._lines: list[bytes] = []
        self._flush_at = 0.0
        self._descriptor = self._open()

    def __call__(self, record: str) -> None:
        """A record of the statistics."""
        if self._descriptor < 0:
            raise ValueError("the file of statistics was closed; records are written until then; make a new one")
        self._lines.append(record.encode() + b"\n")
        now = time.monotonic()
        if now >= self._flush_at or IDLE in record:
            self._flush_at = now + SECONDS_BETWEEN_FLUSHES
            self.flush()

    def flush(self) -> None:
        """Write what was not written yet. What a full disk refused is lost, and whole lines are kept.

        Raises OSError.
        """
        lines, self._lines = b"".join(self._lines), []
        if not lines:
            return
        size = os.fstat(self._descriptor).st_size
        if size and size + len(lines) > self._max_bytes:
            self._rotate()
            size = 0
        try:
            written = os.write(self._descriptor, lines)
            if written < len(lines):
                raise OSError(f"{written} of {len(lines)} bytes were written to {self._path}")
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Write the rest and close the file. Does nothing the second time."""
        if self._descriptor >= 0:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _rotate(self) -> None:
        if self._num_kept == 0:
            os.ftruncate(self._descriptor, 0)
            return
        for number in range(self._num_kept - 1, 0, -1):
            if os.path.exists(f"{self._path}.{number}"):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")
        opened = self._open()
        os.close(self._descriptor)
        self._descriptor = opened
