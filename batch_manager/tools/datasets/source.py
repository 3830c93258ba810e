"""Peek at the first line of an open file of requests, and read its lines or its whole text."""

import gzip
import io
import zlib
from collections.abc import Iterator

from .errors import DatasetError

GZIP_MAGIC = b"\x1f\x8b"
LONGEST_LOOK = 8 << 20    # bytes of the first line to peek at
BOM = b"\xef\xbb\xbf"
NOT_CUT = "write or download the file again"


class Source:
    """Context manager for an open file or pipe, which may be compressed with gzip. Methods raise DatasetError.

    name   name of the file, for messages
    raw    the file, which this object closes

    first_line   the first non-blank line, at most `LONGEST_LOOK` bytes; empty if all lines are blank
    """

    def __init__(self, name: str, raw: io.BufferedReader) -> None:
        self.name = name
        self._file: io.BufferedIOBase = raw
        try:
            if self._is_gzip(raw):
                self._file = gzip.GzipFile(fileobj=raw)
            self._head = self._look()
        except BaseException:
            raw.close()
            raise
        self._raw = raw
        self.first_line = self._head[-1].strip() if self._head else b""

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._raw.close()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (line number, stripped text) of every non-blank line. The first line of the file has number 1."""
        for number, line in enumerate(self._binary_lines(), 1):
            text = self._decoded(line, number).strip()
            if text:
                yield number, text

    def text(self) -> str:
        """Return the whole text."""
        data = b"".join([*self._head, self._read(-1)])
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._not_text(data.count(b"\n", 0, error.start) + 1) from None

    def _is_gzip(self, raw: io.BufferedReader) -> bool:
        try:
            return raw.peek(2)[:2] == GZIP_MAGIC
        except OSError as error:
            raise self._unreadable(error) from None

    def _look(self) -> list[bytes]:
        """Read the lines up to and including the first non-blank line. Returns [] if all lines are blank."""
        head: list[bytes] = []
        while line := self._readline(LONGEST_LOOK):
            if not head:
                line = line.removeprefix(BOM)
            head.append(line)
            if line.strip():
                return head
        return []

    def _binary_lines(self) -> Iterator[bytes]:
        *before, line = self._head or [b""]
        yield from before
        yield line if line.endswith(b"\n") else line + self._readline()    # the peek may have ended within the line
        while line := self._readline():
            yield line

    def _readline(self, limit: int = -1) -> bytes:
        try:
            return self._file.readline(limit)
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from None

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> DatasetError:
        return DatasetError(self.name, f"the file cannot be read: {getattr(error, 'strerror', None) or error}",
                            "expected a complete file", NOT_CUT)

    def _decoded(self, line: bytes, number: int) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise self._not_text(number) from None

    def _not_text(self, line: int) -> DatasetError:
        return DatasetError(f"{self.name}:{line}", "the line is not UTF-8", "expected text: CSV, JSON or JSON lines",
                            "convert the file to UTF-8")
