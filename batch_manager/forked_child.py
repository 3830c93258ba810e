"""Ends a forked child process that returns from foreign code into the engine.

Foreign code, such as a callback, may fork the process. The child then has a copy of the engine's worker thread. The
requests belong to the parent, so the child must send no response and get no request. The engine runs foreign code
in guarded blocks (guard.py). The child ends at the exit of the block in which it was forked. Children of subprocess
and multiprocessing never return from the foreign code, and do not reach this exit.
"""

import os
from typing import NoReturn

from .errors import is_a

current_process_id = os.getpid()    # kept to save a system call per callback


def end_this_process(error: BaseException | None) -> NoReturn:
    """Exit with the status that the interpreter would use for the exception; None: 0."""
    os._exit(_status(error))


def _status(error: BaseException | None) -> int:
    if error is None:
        return 0
    if is_a(error, SystemExit):
        return 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    return 1


def _note_process() -> None:
    global current_process_id
    current_process_id = os.getpid()


os.register_at_fork(after_in_child=_note_process)
