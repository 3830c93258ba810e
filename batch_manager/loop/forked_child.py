"""A process that was forked inside a callback and comes back from it, into a worker that the parent has too.

It must answer nobody and ask nobody: its requests are the parent's. So it ends where it leaves the callback, as a
thread's function ends its thread. A child that stays in the callback (subprocess, multiprocessing) is not met here.
"""

import os


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
    if isinstance(error, SystemExit):
        return 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    return 1


_process_id = os.getpid()    # kept, because asking costs a call of the system at every callback


def _note_process() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_note_process)
