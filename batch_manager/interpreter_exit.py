"""The list of this process's workers, and the hook that stops them when the interpreter exits.

`threading` joins the workers, which are not daemons, before `atexit` runs. Our hook is therefore registered with
`threading`, as the hook of concurrent.futures is. The last registered hook runs first. The hook of concurrent.futures
joins the threads of executors, which may wait for a worker. This file imports concurrent.futures before it registers
our hook, so that our hook runs first.
"""

import concurrent.futures.thread  # noqa: F401
import os
import threading
from typing import Protocol

from .errors import ManagerClosedError


class Abortable(Protocol):
    """The object that controls one worker: a WorkerControl, a Loading or a Link."""

    @property
    def worker(self) -> threading.Thread | None: ...

    def ask_to_abort(self) -> None:
        """Ask the worker to end. Can be called from any thread. Never blocks."""


# A plain dictionary, whose keys are copied in one operation of the interpreter. Copying a WeakSet is a loop in Python,
# which raises if a worker ends meanwhile. The other workers would then never be stopped.
_controls: dict[Abortable, None] = {}
_is_exiting = False


def list_worker(control: Abortable) -> None:
    """Add a worker to the list of workers that are stopped when the interpreter exits.

    Raises ManagerClosedError if the interpreter is exiting already. The worker is added to the list even in this case.
    """
    _controls[control] = None
    if _is_exiting:    # read after listing; the hook sets it before it reads the list, so no worker is missed
        raise ManagerClosedError("the interpreter is exiting", "a worker that starts now would not be stopped",
                                 "make managers before the main thread ends")


def forget_worker(control: Abortable) -> None:
    """Remove a worker from the list, if the list has it."""
    _controls.pop(control, None)


def is_a_worker(thread: threading.Thread) -> bool:
    """Whether `thread` runs callbacks. Such a thread must not wait for the end of a worker, because two workers could
    wait for each other."""
    return control_of(thread) is not None


def control_of(thread: threading.Thread) -> Abortable | None:
    """Return what controls `thread`, or None if it runs no callbacks."""
    return next((control for control in list(_controls) if control.worker is thread), None)


def _abort_all_workers() -> None:
    global _is_exiting
    _is_exiting = True
    for control in list(_controls):
        control.ask_to_abort()


def _forget_all_workers() -> None:
    """Clear the list of workers in a forked child, which has no workers."""
    _controls.clear()


# A private function of CPython, which typeshed does not declare.
threading._register_atexit(_abort_all_workers)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_forget_all_workers)
