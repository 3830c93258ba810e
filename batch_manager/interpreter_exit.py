"""The workers of this process, and how they learn that the interpreter ends.

`threading` joins the workers (they are no daemons) before `atexit` runs, so a worker has to be told earlier:
`threading` offers a hook for exactly that, and concurrent.futures uses it the same way. What was hooked in last is
called first: the threads of an executor, which its hook joins, may wait for a worker, so that hook has to be there
already when ours is put in.
"""

import concurrent.futures.thread  # noqa: F401
import os
import threading
from typing import Protocol

from .errors import ManagerClosedError


class Abortable(Protocol):
    """The control of a worker, or a thread that loads one's model, as far as this file needs it."""

    @property
    def worker(self) -> threading.Thread | None: ...

    def ask_to_abort(self) -> None:
        """Called from any thread. Never blocks."""


# A plain dictionary: a copy of its keys is one operation of the interpreter. Copying a WeakSet is a loop in Python,
# which raises when a worker ends meanwhile, and the others were then never told.
_controls: dict[Abortable, None] = {}
_is_exiting = False


def list_worker(control: Abortable) -> None:
    """Put a worker on the list of those that are told when the interpreter ends.

    Raises ManagerClosedError when it ends already; the worker is on the list all the same.
    """
    _controls[control] = None
    if _is_exiting:    # looked at after it was put on the list; the hook does the two in the other order
        raise ManagerClosedError("the interpreter is ending", "a worker that starts now would not be told",
                                 "make managers before the main thread ends")


def forget_worker(control: Abortable) -> None:
    """Take a worker off the list, if it is on it."""
    _controls.pop(control, None)


def is_a_worker(thread: threading.Thread) -> bool:
    """Whether a callback runs on this thread. Two managers whose callbacks wait for each other would wait for ever."""
    return any(control.worker is thread for control in list(_controls))


def _abort_all_workers() -> None:
    global _is_exiting
    _is_exiting = True
    for control in list(_controls):
        control.ask_to_abort()


def _forget_all_workers() -> None:
    """In a forked child, which has none."""
    _controls.clear()


# Private to CPython, so typeshed does not declare it.
threading._register_atexit(_abort_all_workers)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_forget_all_workers)
