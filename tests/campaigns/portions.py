"""The work of a suite in portions, over processes."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from .registry import Options


def each_done(work: Callable, portions: Iterator[tuple], options: Options,
              is_enough: Callable[[], bool] = lambda: False) -> Iterator[tuple[tuple, Any]]:
    """Each portion with what `work(*portion)` returned, in their order, until it is enough or the time is up.

    portions    two a process are taken ahead; what is left in it at the end was not begun
    is_enough   asked before a portion is taken, and answered from what was yielded before
    """
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    running: deque[tuple[tuple, Future]] = deque()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while True:
            while (len(running) < 2 * options.jobs and (deadline is None or time.monotonic() < deadline)
                   and not is_enough() and (portion := next(portions, None)) is not None):
                running.append((portion, pool.submit(work, *portion)))
            if not running:
                return
            portion, future = running.popleft()
            yield portion, future.result()
