"""The standard output of a program when nothing reads it any more."""

import os
import sys


def discard_standard_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter does not complain about it at its end. For use
    after BrokenPipeError: the reader, `head` say, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
