"""The threads on which stores read and write."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..thread_stack import start_with_enough_stack


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

    def close(self) -> None:
        """End the threads after the submitted jobs. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()


def _serve(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
