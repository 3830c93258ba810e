"""Engines without a warm-up, which takes much of the time that making one takes, for tests of something else."""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def without_warm_up(*, compares_graphs: bool = True) -> Iterator[None]:
    """Context manager: engines are made without a warm-up.

    compares_graphs   whether an engine compares its graphs with launched steps
    """
    from batch_manager.runtime.forms import table

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(table, "warm_up", lambda *given: None))
        if not compares_graphs:
            patches.enter_context(mock.patch.object(table, "difference_of_graphs", lambda *given, **more: None))
        yield
