"""Replaces `threading` in the modules under test by classes with the same names and with yield points.

A task is a thread that scheduler.py runs. Outside a run, and in threads that are not tasks, no call waits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from batch_manager import gpt_manager, interpreter_exit, loading_thread, one_shot_event, worker

from .scheduler import Scheduler, Task


class Threading:
    """The part of `threading` that the manager uses. Its objects yield to one scheduler.

    threads                     the started threads, in order
    before_start, after_start   functions called with each thread that is started; `start` raises their exceptions
    """

    TIMEOUT_MAX = 4e9

    def __init__(self, scheduler: Scheduler) -> None:
        self.threads: list[Thread] = []
        self.before_start: Callable[[Thread], None] = lambda thread: None
        self.after_start: Callable[[Thread], None] = lambda thread: None
        self._scheduler = scheduler
        self._thread_of: dict[Task, Thread] = {}

    def Thread(self, target=None, args=(), kwargs=None, name="thread", daemon=None) -> "Thread":
        return Thread(self, self._scheduler, target, args, kwargs or {}, name, bool(daemon))

    def Lock(self) -> "Lock":
        return Lock(self._scheduler)

    def Event(self) -> "Event":
        return Event(self._scheduler)

    def current_thread(self) -> object:
        task = self._scheduler.current_task()
        return self._thread_of.get(task, task)

    def get_ident(self) -> int:
        return id(self.current_thread())

    def started(self, thread: "Thread", task: Task) -> None:
        self.threads.append(thread)
        self._thread_of[task] = thread


class Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking:
            self._scheduler.point("acquire, without waiting")
            if self._is_held:
                return False
        elif not self._scheduler.wait("acquire", lambda: not self._is_held, None if timeout < 0 else timeout):
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._scheduler.point("release")
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        self._scheduler.point("released")

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        self._scheduler.point("is it set")
        return self._is_set

    def set(self) -> None:
        self._scheduler.point("set")
        self._is_set = True
        self._scheduler.point("was set")

    def clear(self) -> None:
        self._scheduler.point("clear")
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait("wait", lambda: self._is_set, timeout)


class Thread:
    def __init__(self, family: Threading, scheduler: Scheduler, target, args, kwargs, name: str, daemon: bool) -> None:
        self._family, self._scheduler = family, scheduler
        self._target, self._args, self._kwargs = target, args, kwargs
        self.name, self.daemon = name, daemon
        self.task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self.task is None else id(self.task)

    def start(self) -> None:
        self._family.before_start(self)
        function, arguments, options = self._target, self._args, self._kwargs
        self._target = self._args = self._kwargs = None    # as threading does: only the thread refers to them
        self.task = self._scheduler.start_task(self.name.removeprefix("batch_manager "),
                                               lambda: function(*arguments, **options))
        self._family.started(self, self.task)
        self._scheduler.point(f"started {self.task.name}")
        self._family.after_start(self)

    @property
    def has_finished(self) -> bool:
        """Whether the thread has ended. The property is not a yield point, because the checks of world.py read it."""
        return self.task is not None and self.task.has_finished

    def freeze(self) -> None:
        self._scheduler.freeze(self.task.name)

    def is_alive(self) -> bool:
        self._scheduler.point("is it alive")
        return self.task is not None and not self.task.has_finished

    def join(self, timeout: float | None = None) -> None:
        if self._scheduler.current_task() is self.task:
            self._scheduler.violations.append(f"{self.task.name} joins itself")    # the exception may be ignored
            raise RuntimeError("cannot join current thread")
        self._scheduler.wait("join", lambda: self.task.has_finished, timeout)


@contextmanager
def managers_over(threading: object) -> Iterator[None]:
    """Within the context, replace the module `threading` of managers and their workers by the object `threading`.

    The package's handler at interpreter exit does not see other managers of this process.
    """
    nobody = type(interpreter_exit._controls)()
    with (patch.object(gpt_manager, "threading", threading), patch.object(worker, "threading", threading),
          patch.object(one_shot_event, "threading", threading), patch.object(loading_thread, "threading", threading),
          patch.multiple(interpreter_exit, _controls=nobody, _is_exiting=False)):
        yield


@contextmanager
def installed(scheduler: Scheduler) -> Iterator[Threading]:
    """Within the context, run managers on `scheduler`. Yields the replacement of `threading`."""
    threading = Threading(scheduler)
    with managers_over(threading):
        yield threading
