"""Write the output files of a program. A file is written whole or not at all, and never over an input."""

import errno
import io
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

NAME_KEPT = 40      # characters of the output's name in the name of the temporary file, whose length is limited too
STANDARD_OUTPUT = Path("-")
STANDARD_OUTPUT_NAME = "the standard output"


class OutputError(OSError):
    """An output cannot be written. `filename` is the output's name, as `name_of` returns it."""

    def __str__(self) -> str:
        fact = f"{self.filename} cannot be written: {self.strerror}"
        if self.filename == STANDARD_OUTPUT_NAME:
            return f"{fact}; direct it elsewhere"
        return f"{fact}; expected a file in a folder that exists, with room on its disk; name another one"


class OutputFiles:
    """The output files of one command.

    All files appear at the end of `with`. After an exception no file appears, and existing files keep their content.

    source   the input file, which is never overwritten

    Each output is written to a temporary file in the same folder, which then replaces the output. If the output is a
    link, its target is replaced. A replaced file keeps its permissions. "-" is the standard output. A pipe, a device or
    the standard output is written directly.

    Methods raise OutputError if an output cannot be written.
    """

    def __init__(self, source: Path | None = None) -> None:
        self._source = source
        self._opened: list[_Output] = []

    def open(self, path: Path, mode: str = "w") -> IO[Any]:
        """Open an output for writing. This object closes the file.

        mode   "w" (UTF-8, no translation of line ends) or "wb"

        Raises ValueError if `path` is the source, or already an output of this command.
        """
        target = Path(os.path.realpath(path))
        is_standard_output = path == STANDARD_OUTPUT
        if not is_standard_output and self._source is not None and target.exists() and target.samefile(self._source):
            raise ValueError(f"writing {path} would overwrite the input; expected another file; name one")
        part = None
        if not is_standard_output and (not path.exists() or path.is_file()):
            if any(each.part is not None and each.target == target for each in self._opened):
                raise ValueError(f"{path} is named for two outputs; expected a file for each; name another one")
            part = target.with_name(f".{target.name[:NAME_KEPT]}.{secrets.token_hex(8)}.part")
        with _errors_naming(path):
            if target.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if is_standard_output:
                sys.stdout.flush()
                raw = _Raw(os.dup(sys.stdout.fileno()), "w")
            else:
                raw = _Raw(path, "w") if part is None else _Raw(part, "x")
        raw.output = path
        file: IO[Any] = io.BufferedWriter(raw)
        if "b" not in mode:
            file = io.TextIOWrapper(file, encoding="utf-8", newline="")
        self._opened.append(_Output(path, target, part, file))
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._place()
        finally:
            self._remove()

    def _place(self) -> None:
        """Close all temporary files, and then replace the outputs.

        Closing a file may fail for lack of disk space. In this case no output has been replaced.
        """
        for output in self._opened:
            output.file.close()
            if output.part is not None and output.target.exists():
                with _errors_naming(output.path):
                    output.part.chmod(stat.S_IMODE(output.target.stat().st_mode))
        for output in self._opened:
            if output.part is not None:
                with _errors_naming(output.path):
                    output.part.replace(output.target)

    def _remove(self) -> None:
        for output in self._opened:
            with suppress(OSError):             # the disk may be full
                output.file.close()
            if output.part is not None:
                output.part.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Output:
    """One opened output.

    part   the temporary file; None: the output is a pipe, a device or the standard output
    """

    path: Path
    target: Path
    part: Path | None
    file: IO[Any]


class _Raw(io.FileIO):
    """A file whose write errors are OutputErrors with a path. Without this class, errors of a full disk have no path.

    output   path that the errors name
    """

    output: Path

    def write(self, data: Any, /) -> int | None:
        with _errors_naming(self.output):
            return super().write(data)


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Raise every OSError except BrokenPipeError as an OutputError with this path.

    The original error may have the path of the temporary file.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror, name_of(path)) from error


@contextmanager
def output_file(path: Path, *, source: Path | None = None, mode: str = "w") -> Iterator[IO[Any]]:
    """Context manager that yields one output file for writing. The file behaves as a file of `OutputFiles`."""
    with OutputFiles(source) as files:
        yield files.open(path, mode)


def name_of(path: Path) -> str:
    """Return the name of an output in messages."""
    return STANDARD_OUTPUT_NAME if path == STANDARD_OUTPUT else str(path)


def why_not_writable(path: Path) -> str:
    """Return why the file `path` cannot be written, or "" if it can. Programs call this function before long work."""
    if path == STANDARD_OUTPUT:
        return ""
    if path == Path():
        return "the name is empty or '.'; expected a file"
    if path.is_dir():
        return f"{path} is a folder; expected a file; name one in it"
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        return f"{path} is a link that leads back to itself; expected a file; name another one"
    if path.exists() and not path.is_file():
        reason = f"{path} is not writable; expected a writable file; name another one"
        return "" if os.access(path, os.W_OK) else reason
    if not target.parent.is_dir():
        return f"{path} is in a folder that does not exist; expected an existing one; make it, or name another file"
    if not os.access(target.parent, os.W_OK | os.X_OK):
        return f"the folder of {path} is not writable; expected a writable one; name another file"
    return ""


def why_not_distinct(outputs: Mapping[str, Path], inputs: Mapping[str, str | os.PathLike[str]]) -> str:
    """Return why output files collide, or "" if they do not.

    outputs, inputs   name of the option -> the file that the option names

    Outputs collide if two of them name the same file, or if one names an input. A pipe or a device may be named twice.
    """
    named = {os.path.realpath(path): option for option, path in inputs.items()}
    for option, path in outputs.items():
        if path.is_file() or not path.exists():
            other = named.setdefault(os.path.realpath(path), option)
            if other != option:
                return f"{other} and {option} both name {path}; expected a file for each; name another one"
    return ""


def why_no_folder(path: Path) -> str:
    """Return why files cannot be written into the folder `path`, or "" if they can. The folder need not exist yet."""
    above = path
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        return f"{above} is not a folder; expected a folder; name another one"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"the folder {above} is not writable; expected a writable one; name another one"
    return ""
