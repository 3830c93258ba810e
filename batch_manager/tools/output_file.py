"""Files that a program writes: whole or not at all, and never over the file that it reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def output_file(path: Path, *, source: Path | None = None, mode: str = "w") -> Iterator[IO]:
    """Open `path` for writing. The file appears when the block ends; where the block raises, `path` is as it was.

    source   the file that the output is made from
    mode     "w" (UTF-8, line ends as they are written) or "wb"

    A link stays a link, and what it points at is written. A pipe or a device is written directly. What is written
    stands in `path` with `.part` appended until it is complete. Raises ValueError where either file is `source`;
    OSError where it cannot be written.
    """
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    if path.exists() and not path.is_file():                 # a pipe, /dev/stdout: nothing else can stand in its place
        with path.open(mode, **text) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part")
    if source is not None and any(each.exists() and each.samefile(source) for each in (target, part)):
        raise ValueError(f"writing {path} would overwrite the trace itself; expected another file; name one")
    try:
        with part.open(mode, **text) as file:
            yield file
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)                         # nothing half written stays
        raise
