"""Runs the work of a suite in portions, in several processes."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from .registry import Options


def each_done(work: Callable, portions: Iterator[tuple], options: Options,
              is_enough: Callable[[], bool] = lambda: False) -> Iterator[tuple[tuple, Any]]:
    """Yield (portion, result of `work(*portion)`) for each portion, in order.

    No portion is started after `is_enough()` returned True or `options.seconds` have passed.

    portions    up to two portions per process are started before their results are yielded; the portions left in the
                iterator at the end were not started
    is_enough   called before a portion is started; the caller can decide by the results yielded until then
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
