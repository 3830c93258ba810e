"""A process that was forked inside the user's code and comes back from it, into a worker that the parent has too.

It must answer nobody and ask nobody: its requests are the parent's. So it ends where it leaves a callback or a logits
post-processor, as a thread's function ends its thread; from a scheduler, a clock or another part it comes no further
than to the next step, callback or answer. A child that stays in the user's code (subprocess, multiprocessing) is not
met here.
"""

import os

from .errors import is_a


class Fork:
    """Knows whether this process is a copy of the one it was made in."""

    __slots__ = ("_process_id",)

    def __init__(self) -> None:
        self._process_id = os.getpid()

    def end_the_child(self, error: BaseException | None = None) -> None:
        """In the copy: end it with the status that `error` stands for. In the original: nothing."""
        if self._process_id != _process_id:
            os._exit(_status(error))


def _status(error: BaseException | None) -> int:
    if error is None:
        return 0
    if is_a(error, SystemExit):
        return 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    return 1


_process_id = os.getpid()    # kept, because asking costs a call of the system at every callback


def _note_process() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_note_process)
