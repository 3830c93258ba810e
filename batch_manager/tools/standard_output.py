"""Print to a standard output that may be closed or full."""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from .output_file import STANDARD_OUTPUT_NAME, OutputError

DONE, WRONG = 0, 2


class StandardOutputError(Exception):
    """The standard output cannot be written. Not an OSError, which a command would take for one of its files."""


def reported(program: str, command: Callable[[], int]) -> int:
    """Run a command, and return its exit status, with one message if the standard output is closed or full.

    A failed write to the standard output ends the command with StandardOutputError, whose message goes to stderr; the
    status is then 2. A reader that has exited, for example `head`, is not an error. What is written to a closed stderr
    is discarded.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    _name_errors()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_standard_output()
        return DONE
    except StandardOutputError as error:
        discard_standard_output()
        print(f"{program}: {error}", file=sys.stderr)
        return WRONG


class _Raw(io.FileIO):
    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StandardOutputError(OutputError(error.errno, error.strerror, STANDARD_OUTPUT_NAME)) from error


def _name_errors() -> None:
    """Replace the process's standard output by one whose errors are StandardOutputErrors; also a closed one."""
    given = sys.stdout
    if given is None:          # a file that cannot be written; it takes the free descriptor, so that no other file does
        raw = _Raw(os.open(os.devnull, os.O_RDONLY), "w")
    elif given is sys.__stdout__:
        raw = _Raw(given.fileno(), "w", closefd=False)
    else:
        return                 # that of a host, for example of a test
    settings = {} if given is None else {"encoding": given.encoding, "errors": given.errors,
                                         "line_buffering": given.line_buffering}
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), **settings)


def discard_standard_output() -> None:
    """Discard the rest of the standard output, so that the interpreter does not fail to flush it at exit.

    Programs call this function after BrokenPipeError, which means that the reader, for example `head`, has exited.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_flushed(text: str) -> None:
    """Print a text and flush it. A reader that has exited is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_standard_output()
