"""The threads of a store, for engines without threads."""

from collections.abc import Callable


class HeldThreads:
    """Stands for stores.threads.StoreThreads. Runs a job `turns` calls of `turn` after it came; 0: at once.

    waits   whether jobs are held until `run` or `turn`; the first one, which opens the store, never is
    """

    def __init__(self, turns: int = 0) -> None:
        self.jobs: list[Callable[[], None]] = []
        self._turns, self._due, self._is_first = turns, turns, True
        self.waits = turns > 0

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        if not self.waits or self._is_first:
            self.run()
        self._is_first = False

    def turn(self) -> None:
        self._due -= 1
        if self._due <= 0:
            self.run()

    def run(self) -> None:
        self._due = self._turns
        while self.jobs:
            self.jobs.pop(0)()

    def close(self, seconds: float = 0.0, late: Callable[[], None] = lambda: None) -> bool:
        self.run()
        return True
