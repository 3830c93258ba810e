"""Threads that prepare requests leave the interpreter lock to the event loop.

With a switch interval of an hour, a waiting thread gets the lock only if the running one releases it by itself.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from batch_manager.engine_info import EngineInfo
from batch_manager.extras.openai.pauses import with_pauses
from batch_manager.extras.sampling import Sampling

MOST_S = 60


@pytest.fixture
def turns() -> Iterator[Callable[[], int]]:
    """How often a thread that always waits for the lock has got it."""
    taken, is_over, is_running = count(), threading.Event(), threading.Event()
    latest = [0]

    def wait_for_the_lock() -> None:
        while not is_over.is_set():
            latest[0] = next(taken)
            is_running.set()
            time.sleep(0)

    thread, interval = threading.Thread(target=wait_for_the_lock), sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()
        assert is_running.wait(MOST_S)
        yield lambda: latest[0]
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join(MOST_S)


def test_long_work_with_pauses_leaves_the_lock_to_others(turns):
    before, end = turns(), time.monotonic() + MOST_S
    for _ in with_pauses(count()):
        if turns() > before or time.monotonic() > end:
            break
    assert turns() > before


def test_the_tensors_of_a_request_need_no_system_call(turns):
    """A thread that releases the lock for a moment per request would keep the event loop from it for all of them."""
    info = EngineInfo.__new__(EngineInfo)
    before = turns()
    seeds = {Sampling(max_tokens=1, ignore_eos=True).tensors([1], info)["random_seed"] for _ in range(1000)}
    assert turns() == before and len(seeds) == 1000 and max(seeds) >= 2**63


def test_seeds_of_a_forked_child_are_its_own():
    def seed() -> int:
        return Sampling(max_tokens=1, ignore_eos=True).tensors([1], EngineInfo.__new__(EngineInfo))["random_seed"]

    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, seed().to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    assert int.from_bytes(os.read(reader, 8), "little") != seed()
    os.close(reader)
    os.close(writer)
