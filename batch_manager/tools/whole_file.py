"""Files that are written whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: Path, write: Callable[[IO[str]], object]) -> None:
    """Write a text file: into FILE.part first, which then takes the place of the file.

    write   is given the open file

    What a link points at is written, not the link. A pipe or a device (/dev/stdout) is written as it is: nothing can
    take its place. Where writing fails, the file is as it was and no .part stays. Raises OSError, and what `write`
    raises.
    """
    try:
        _write(path, write)
    except OSError as error:            # one of a full disk does not say of which file
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, write: Callable[[IO[str]], object]) -> None:
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as file:
            write(file)
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            write(file)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
