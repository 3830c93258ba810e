"""Long work in a thread beside the event loop."""

from collections.abc import Iterable, Iterator
from time import perf_counter, sleep
from typing import TypeVar

SECONDS_AT_ONCE, SECONDS_OF_A_PAUSE = 0.002, 0.0001
_Item = TypeVar("_Item")


def with_pauses(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and sleep briefly every few milliseconds, so that the event loop gets the interpreter lock.

    A thread that releases the lock often and at once takes it again, as NumPy does for more than 500 numbers, would
    keep it from waiting threads: each release starts their switch interval anew. Not for the event loop's own thread.
    """
    since = perf_counter()
    for item in items:
        yield item
        if perf_counter() - since > SECONDS_AT_ONCE:
            sleep(SECONDS_OF_A_PAUSE)
            since = perf_counter()
