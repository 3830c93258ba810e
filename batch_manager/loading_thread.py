"""Loads a model on a separate thread.

The loading is interrupted when its caller is interrupted, and when the interpreter exits.

OpenMP keeps a team of threads for every thread that ever computed. If the caller loaded the model, the caller's team
and the worker's team would together have more threads than there are cores. libgomp would then put a team to sleep at
every barrier: a step of a 135M model on two cores took 40 ms instead of 20 ms.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .errors import ManagerClosedError
from .interpreter_exit import forget_worker, list_worker
from .one_shot_event import OneShotEvent
from .thread_stack import start_with_enough_stack

Loaded = TypeVar("Loaded")
SECONDS_BETWEEN_LOOKS = 1.0
_here = threading.local()


class Loading(Generic[Loaded]):
    """The loading thread and its result.

    The thread is not a daemon, because a daemon that computes at interpreter exit aborts the process.

    loaded           list with the result of `load`, or empty
    error            the exception of `load`, or None
    is_interrupted   whether the loading must stop, because no caller needs its result any more
    reason           the exception with which the loading must stop; None: none
    """

    worker = None    # for interpreter_exit: no callback runs on this thread

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._load = load
        self._has_ended = OneShotEvent()
        self._thread = threading.Thread(target=self._run, name="batch_manager loading", daemon=False)
        self.loaded: list[Loaded] = []
        self.error: BaseException | None = None
        self.is_interrupted = False
        self.reason: BaseException | None = None

    def _run(self) -> None:
        _here.loading = self
        try:
            self.loaded.append(self._load())
        except BaseException as error:
            self.error = error
        finally:
            self._has_ended.set()

    def start(self) -> None:
        start_with_enough_stack(self._thread)

    def wait(self) -> None:
        """Wait until the thread has ended, if it was started. Thread.join alone may return early after a Ctrl-C."""
        if self._thread.ident is not None:
            while not self._has_ended.wait(SECONDS_BETWEEN_LOOKS) and self._thread.is_alive():
                pass
            self._thread.join()

    def stop_with(self, reason: BaseException) -> None:
        """Ask the thread to raise `reason`. Never blocks. Takes effect when it next calls `check_interruption`."""
        self.reason = reason

    def ask_to_abort(self) -> None:
        """Ask the thread to end. Never blocks. Takes effect when the thread next calls `check_interruption`."""
        self.is_interrupted = True


def check_interruption() -> None:
    """Raise KeyboardInterrupt if the loading on this thread is interrupted, and the reason that `stop_with` was given.

    Loaders call this function repeatedly.
    """
    loading = current_loading()
    if loading is not None and loading.is_interrupted:
        raise KeyboardInterrupt("the loading was interrupted")
    if loading is not None and loading.reason is not None:
        raise loading.reason


def current_loading() -> "Loading[Any] | None":
    """Return the loading that runs on this thread, or None."""
    return getattr(_here, "loading", None)


def load_in_own_thread(load: Callable[[], Loaded], undo: Callable[[Loaded], Any]) -> Loaded:
    """Call `load` on a new thread. After the thread has ended, return the result of `load` or raise its exception.

    undo   called with the result of `load` if `load` succeeds but this function raises

    An exception in the waiting caller, such as Ctrl-C, interrupts the loading and propagates after the thread has
    ended. Raises ManagerClosedError while the interpreter exits.
    """
    loading = Loading(load)
    try:
        try:
            list_worker(loading)
        except ManagerClosedError:
            loading.ask_to_abort()
            if sys.is_finalizing():      # a thread that is started now never runs, and its starter waits for it
                raise
        loading.start()
        loading.wait()
        forget_worker(loading)
        if loading.error is None:
            return loading.loaded[0]
        if loading.is_interrupted:
            raise ManagerClosedError("the interpreter is exiting", "a model that is loaded now would serve no request",
                                     "make managers before the main thread ends")
        raise loading.error
    except BaseException:
        _abandon(loading, undo)
        raise


def _abandon(loading: Loading[Loaded], undo: Callable[[Loaded], Any]) -> None:
    loading.ask_to_abort()
    while True:
        try:
            loading.wait()
            break
        except KeyboardInterrupt:    # a second Ctrl-C cannot end it sooner
            continue
    forget_worker(loading)
    for loaded in loading.loaded:
        undo(loaded)
