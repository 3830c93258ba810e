"""Runs the work of a suite in portions, in several processes."""

import contextlib
import itertools
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from .registry import Options

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def each_done(work: Callable, portions: Iterator[tuple], options: Options,
              is_enough: Callable[[], bool] = lambda: False) -> Iterator[tuple[tuple, Any]]:
    """Yield (portion, result of `work(*portion)`) for each portion, in order.

    No portion is started after `is_enough()` returned True or `options.seconds` have passed. Ctrl-C and SIGTERM, which
    `timeout` sends, end the portions that are running; those before them have been yielded, so that the caller counts
    what ran.

    portions    up to two portions per process are started before their results are yielded; the portions left in the
                iterator at the end were not started
    is_enough   called before a portion is started; the caller can decide by the results yielded until then
    """
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    running: deque[tuple[tuple, Future]] = deque()
    with (ProcessPoolExecutor(options.jobs, get_context("spawn"), _leave_signals_to_the_parent) as pool,
          _noted_signals() as signals):
        while True:
            is_late = deadline is not None and time.monotonic() >= deadline
            while (len(running) < 2 * options.jobs and not is_late
                   and not is_enough() and (portion := next(portions, None)) is not None):
                running.append((portion, pool.submit(work, *portion)))
            if is_late:
                running = deque(pair for pair in running if not pair[1].cancel())
            if not running:
                return
            portion, future = running[0]
            if wait([future], timeout=1).done:
                running.popleft()
                yield portion, future.result()
            if signals:
                processes = list(pool._processes.values())
                pool.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.kill()
                return


class Total(NamedTuple):
    """What seeds in a row did: their counts added up, a line for each failure, and the last seed that ran."""

    counts: Counter
    failures: list[str]
    last_seed: int


def run_seeds(run_seed: Callable[[int, Path], tuple[Counter, list[str]]], options: Options,
              is_enough: Callable[[Counter], bool], seeds_a_portion: int = 1) -> Total:
    """Run seeds from `options.first_seed` on, in portions; see `each_done`.

    run_seed    (seed, folder for its files) -> (counts, a line for each failure); a function that can be pickled
    is_enough   (counts of all seeds until now) -> whether no more are needed
    """
    total, failures, last_seed = Counter(), [], options.first_seed - 1
    portions = ((seed, seeds_a_portion) for seed in itertools.count(options.first_seed, seeds_a_portion))
    for (seed, _), (counts, found) in each_done(partial(_portion, run_seed), portions, options,
                                                lambda: is_enough(total)):
        last_seed = seed + seeds_a_portion - 1
        total.update(counts)
        failures += found
    return Total(total, failures, last_seed)


def _portion(run_seed: Callable, first_seed: int, count: int) -> tuple[Counter, list[str]]:
    total, failures = Counter(), []
    with tempfile.TemporaryDirectory() as parent:
        for seed in range(first_seed, first_seed + count):
            counts, found = run_seed(seed, Path(parent))
            total.update(counts)
            failures += found
    return total, failures


def _leave_signals_to_the_parent() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Context manager: SIGINT and SIGTERM are appended to the yielded list instead of ending the process."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda given, _: noted.append(given)) for number in SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
