"""Loading on a thread of its own, which is interrupted when its caller is, or the interpreter ends.

OpenMP keeps a team of threads for every thread that ever computed. With one for the caller, which loaded the model,
and one for the worker there are more threads than cores, and libgomp then puts a team to sleep at every barrier: a step
of a 135M model on two cores took 40 ms instead of 20.
"""

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
    """What the thread does. It is no daemon: one that computes while the interpreter ends aborts the process.

    loaded           what `load` returned, or nothing
    error            what it raised, or None
    is_interrupted   no thread waits for it any more
    """

    worker = None    # no callback runs on it; interpreter_exit asks

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._load = load
        self._has_ended = OneShotEvent()
        self._thread = threading.Thread(target=self._run, name="batch_manager loading", daemon=False)
        self.loaded: list[Loaded] = []
        self.error: BaseException | None = None
        self.is_interrupted = False

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
        """Until the thread has ended, if it was started. Not by Thread.join alone, which a Ctrl-C may make believe that
        it has."""
        if self._thread.ident is not None:
            while not self._has_ended.wait(SECONDS_BETWEEN_LOOKS) and self._thread.is_alive():
                pass
            self._thread.join()

    def ask_to_abort(self) -> None:
        """Never blocks. The thread sees it where it calls `check_interruption`."""
        self.is_interrupted = True


def check_interruption() -> None:
    """To be called now and then by what loads. Raises KeyboardInterrupt when no thread waits for it any more."""
    loading = getattr(_here, "loading", None)
    if loading is not None and loading.is_interrupted:
        raise KeyboardInterrupt("the loading was interrupted")


def in_a_thread_of_its_own(load: Callable[[], Loaded], undo: Callable[[Loaded], Any]) -> Loaded:
    """What `load` returns or raises, computed on a thread that has ended when this returns or raises.

    undo   called with what was loaded, where this raises all the same

    What strikes the waiting caller, such as Ctrl-C, interrupts the loading, and passes when that has ended. Raises
    ManagerClosedError while the interpreter ends.
    """
    loading = Loading(load)
    try:
        try:
            list_worker(loading)
        except ManagerClosedError:
            loading.ask_to_abort()
        loading.start()
        loading.wait()
        forget_worker(loading)
        if loading.error is None:
            return loading.loaded[0]
        if loading.is_interrupted:
            raise ManagerClosedError("the interpreter is ending", "a model that is loaded now would serve no request",
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
        except KeyboardInterrupt:    # it ends as soon as it can, however often it is asked to
            continue
    forget_worker(loading)
    for loaded in loading.loaded:
        undo(loaded)
