"""The threads on which stores read and write, and the guard around each call."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from ..one_shot_event import OneShotEvent
from ..thread_stack import start_with_enough_stack

Answer = TypeVar("Answer")


def tried(call: Callable[[], Answer]) -> tuple[Answer | None, BaseException | None]:
    """Return (what a call into a store returns, None), or (None, the exception of any kind that it raises)."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


class StoreThreads:
    """Runs jobs in order of arrival on a few threads, which the first job starts."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise."""
        if not self._threads:
            for number in range(self._num_threads):
                thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True,
                                          name=f"batch_manager store {number}")
                start_with_enough_stack(thread)
                self._threads.append(thread)
        self._jobs.put(job)

    def close(self, seconds: float = 10.0, late: Callable[[], None] = lambda: None) -> bool:
        """End the threads after the submitted jobs. Idempotent. Returns False if one still runs after these seconds.

        late   then runs on a thread, once all submitted jobs have returned. It must not raise
        """
        threads, self._threads = self._threads, []
        if not threads:
            return True
        have_returned = OneShotEvent()
        for _ in threads[1:]:
            self._jobs.put(None)
        self._jobs.put(have_returned.set)          # the other threads have ended, and only the last one takes it
        is_in_time = have_returned.wait(seconds)
        if not is_in_time:
            self._jobs.put(late)
        self._jobs.put(None)
        for thread in threads if is_in_time else ():
            thread.join()
        return is_in_time


def _serve(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
