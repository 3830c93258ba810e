"""Files that a program writes: whole or not at all, and never over the file that it reads."""

import io
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

NAME_KEPT = 40      # characters of the file's name in the temporary one, which must not be too long either


class OutputFiles:
    """The files of one command: at the end of `with` all of them appear. Where it is left by an exception none does,
    and files that were there are as they were.

    source   the file that the outputs are made from

    Each is written into a file of its own beside it, with a name that no other file has, which then takes its place.
    A link stays a link, and what it points at is written. A pipe or a device (/dev/stdout) is written directly: nothing
    can take its place. A file that is replaced keeps its permissions.

    Raises OSError, with the name of the output, where one cannot be written.
    """

    def __init__(self, source: Path | None = None) -> None:
        self._source = source
        self._opened: list[_Output] = []

    def open(self, path: Path, mode: str = "w") -> IO[Any]:
        """Open an output for writing, and leave its closing to this object.

        mode   "w" (UTF-8, line ends as they are written) or "wb"

        Raises ValueError where it is the source, or an output of this command already.
        """
        target = Path(os.path.realpath(path))
        if self._source is not None and target.exists() and target.samefile(self._source):
            raise ValueError(f"writing {path} would overwrite the trace itself; expected another file; name one")
        part = None
        if not path.exists() or path.is_file():
            if any(each.part is not None and each.target == target for each in self._opened):
                raise ValueError(f"{path} is named for two outputs; expected a file for each; name another one")
            part = target.with_name(f".{target.name[:NAME_KEPT]}.{secrets.token_hex(8)}.part")
        with _told_as(path):
            raw = _Raw(path, "w") if part is None else _Raw(part, "x")
        raw.told_as = path
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
        """Everything that may take room comes before the first file is replaced."""
        for output in self._opened:
            output.file.close()
            if output.part is not None and output.target.exists():
                with _told_as(output.path):
                    output.part.chmod(stat.S_IMODE(output.target.stat().st_mode))
        for output in self._opened:
            if output.part is not None:
                with _told_as(output.path):
                    output.part.replace(output.target)

    def _remove(self) -> None:
        for output in self._opened:
            with suppress(OSError):             # of a full disk, once more
                output.file.close()
            if output.part is not None:
                output.part.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Output:
    """part: what is written until it is complete; None: a pipe or a device."""

    path: Path
    target: Path
    part: Path | None
    file: IO[Any]


class _Raw(io.FileIO):
    """told_as   the output that errors name; one of a full disk would name no file"""

    told_as: Path

    def write(self, data: Any, /) -> int | None:
        with _told_as(self.told_as):
            return super().write(data)


@contextmanager
def _told_as(path: Path) -> Iterator[None]:
    """An OSError names this file: the user knows no temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def output_file(path: Path, *, source: Path | None = None, mode: str = "w") -> Iterator[IO[Any]]:
    """One output, as `OutputFiles` writes it."""
    with OutputFiles(source) as files:
        yield files.open(path, mode)


def why_not_writable(path: Path) -> str:
    """Why a file could not be written here, known before the work whose result it is to hold; "": nothing is known."""
    if path.is_dir():
        return f"{path} is a folder; expected a file; name one in it"
    if path.exists() and not path.is_file():
        told = f"{path} cannot be written; expected a file that can; name another one"
        return "" if os.access(path, os.W_OK) else told
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        return f"{path} is in a folder that does not exist; expected one that does; make it, or name another file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder of {path} cannot be written; expected one that can; name another file"
    return ""


def why_not_distinct(outputs: Mapping[str, Path], inputs: Mapping[str, str | os.PathLike[str]]) -> str:
    """Why these outputs, by the options that name them, cannot be written: one of them is named twice, or is an input.
    "": none is. A pipe or a device may be."""
    named = {os.path.realpath(path): option for option, path in inputs.items()}
    for option, path in outputs.items():
        if path.is_file() or not path.exists():
            other = named.setdefault(os.path.realpath(path), option)
            if other != option:
                return f"{other} and {option} both name {path}; expected a file for each; name another one"
    return ""


def why_no_folder(path: Path) -> str:
    """Why files could not be written into this folder, which may be made first; "": nothing is known."""
    above = path
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        return f"{above} is no folder; expected one; name another one"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"the folder {above} cannot be written; expected one that can; name another one"
    return ""
