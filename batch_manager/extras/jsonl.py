"""Statistics as JSON lines in a file of bounded size.

    with JsonlStatistics("statistics.jsonl") as statistics:
        manager = GptManager(..., return_batch_manager_stats_cb=statistics)
"""

import os
import time
from typing import Self

__all__ = ["JsonlStatistics"]

SECONDS_BETWEEN_FLUSHES = 1.0
IDLE = '"Active Request Count":0,'    # may be the last record for a while: flush it


class JsonlStatistics:
    """A statistics callback that appends each record to a file, one line per record.

    path         path of the file; existing lines stay
    max_bytes    size limit of the file; only a single longer record exceeds it. Before a write that would exceed the
                 limit, the file is renamed to `path.1`, an existing `path.1` to `path.2`, and so on
    num_kept     number of renamed files to keep; 0: the file is emptied and not renamed

    Lines are written with the first record after a second, with a record of an idle engine (flush_stats_when_idle), and
    at `close`: close it after the manager, or the last records are lost. A write error, such as a full disk,
    raises OSError in the callback and loses the pending lines. The engine counts and logs the error. Later records are
    written normally. Not thread-safe.
    """

    def __init__(self, path: str | os.PathLike, *, max_bytes: int = 64 << 20, num_kept: int = 3) -> None:
        if max_bytes < 1 or num_kept < 0:
            raise ValueError(f"max_bytes is {max_bytes} and num_kept is {num_kept}; expected max_bytes of at "
                             "least 1 and num_kept of at least 0")
        self._path, self._max_bytes, self._num_kept = os.fspath(path), max_bytes, num_kept
        self._lines: list[bytes] = []
        self._num_pending_bytes = 0
        self._flush_at = 0.0
        self._descriptor = self._open()

    def __call__(self, record: str) -> None:
        """Take one statistics record, which is JSON. Raises ValueError after `close`."""
        if self._descriptor < 0:
            raise ValueError("the statistics file is closed; make a new JsonlStatistics")
        line = record.encode() + b"\n"
        try:
            if self._lines and self._num_pending_bytes + len(line) > self._max_bytes:
                self.flush()
        finally:
            self._lines.append(line)
            self._num_pending_bytes += len(line)
        now = time.monotonic()
        if now >= self._flush_at or IDLE in record:
            self._flush_at = now + SECONDS_BETWEEN_FLUSHES
            self.flush()

    def flush(self) -> None:
        """Write pending lines.

        Raises OSError on failure: the pending lines are lost, and the file keeps only whole lines.
        """
        lines, self._lines, self._num_pending_bytes = b"".join(self._lines), [], 0
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
        """Write pending lines and close the file. Idempotent."""
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
