"""Ends a process that was forked inside foreign code and leaves it, into a worker that the parent has too.

Its requests are the parent's, so it must send no response and ask for no request. It ends where it leaves the guarded
block it was forked in, as a thread's function ends its thread. A child that stays in the foreign code (subprocess,
multiprocessing) never gets there.
"""

import os
from typing import NoReturn

from .errors import is_a

current_process_id = os.getpid()    # kept, because asking costs a system call at every callback


def end_this_process(error: BaseException | None) -> NoReturn:
    """End it with the status that the exception it leaves by stands for; None: 0."""
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
