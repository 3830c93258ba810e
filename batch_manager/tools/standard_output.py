"""Print to a standard output that may be closed or full."""

import os
import sys

from .output_file import STANDARD_OUTPUT_NAME, OutputError


def discard_standard_output() -> None:
    """Discard the rest of the standard output, so that the interpreter does not fail to flush it at exit.

    Programs call this function after BrokenPipeError, which means that the reader, for example `head`, has exited.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_flushed(text: str) -> None:
    """Print a text and flush it. A reader that has exited is not an error. Raises OutputError for other failures."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_standard_output()
    except OSError as error:
        discard_standard_output()
        raise OutputError(error.errno, error.strerror, STANDARD_OUTPUT_NAME) from error
