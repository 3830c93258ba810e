"""Runs functions that fork often in a process without torch, because its forks take a fraction of the time."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_a_small_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process that has imported only the function's module. Return the result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *arguments).result(300)
