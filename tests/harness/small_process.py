"""Runs functions that fork often in a process without torch, because its forks take a fraction of the time."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def small_process() -> Iterator[Callable[..., Any]]:
    """Start a process that imports only the modules of the functions that it calls.

    Yields `call(function, *arguments)`, which calls a function there and returns its result.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        processes.submit(int).result(300)                          # starts the threads of the pool, too
        yield lambda function, *arguments: processes.submit(function, *arguments).result(300)


def in_a_small_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process that has imported only the function's module. Return the result."""
    with small_process() as call:
        return call(function, *arguments)
