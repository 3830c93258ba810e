"""Callbacks that return before they have run: `async def`, and generators where nobody reads what is yielded."""

import inspect
from collections.abc import Callable


def returns_before_it_runs(callback: Callable | None, *, may_yield: bool) -> bool:
    """Whether calling it only makes something that somebody else has to run.

    may_yield   what it returns is iterated over, so it may be a generator function
    """
    kinds = [inspect.iscoroutinefunction, inspect.isasyncgenfunction]
    if not may_yield:
        kinds.append(inspect.isgeneratorfunction)
    forms = (callback, getattr(type(callback), "__call__", None))    # noqa: B004  an object may have an async one
    return any(is_of_kind(form) for is_of_kind in kinds for form in forms)
