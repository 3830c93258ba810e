"""On how many threads a step on a CPU computes, without changing on how many anybody else's threads do.

torch keeps one number for the process, with which a thread begins when it first computes, and one for each thread that
has begun, which is what OpenMP and MKL go by there. `torch.set_num_threads` writes the number of the process and that
of the thread that calls it. So a number for one thread alone takes two writes: the thread sets its own, and a thread
that is made for it, and has nothing of its own to keep, puts that of the process back.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import torch

LONGEST_CHANGE_S = 1.0             # the number of the process is put back after that, whatever became of the thread

# Held while the number of the process is not the host's: no thread of ours begins with it, or takes it for the host's.
_changing = threading.Lock()


@contextlib.contextmanager
def compute_threads(device: torch.device, count: int | None,
                    is_own: Callable[[threading.Thread], bool] = lambda thread: False) -> Iterator[None]:
    """Compute on `count` threads if the device is a CPU. None: on as many as the thread does anyhow.

    The thread has its own number back afterwards, except where `is_own` says that it is the engine's: there the number
    stays, and the next step finds it set. That of the process, and with it what new threads of the host begin with, is
    another for as long as it takes to set this one.
    """
    if device.type != "cpu":
        yield
        return
    before = thread_count()
    if count is None or count == before:
        yield
        return
    _set_for_this_thread_alone(count)
    if is_own(threading.current_thread()):
        yield
        return
    try:
        yield
    finally:
        _set_for_this_thread_alone(before)


def thread_count() -> int:
    """On how many threads the calling thread computes: what is set for the process, or what was set here."""
    with _changing:                                 # a thread's first look is what it begins with
        return torch.get_num_threads()


def _set_for_this_thread_alone(count: int) -> None:
    ready, changed = threading.Event(), threading.Event()

    def put_back() -> None:
        of_the_process = torch.get_num_threads()
        ready.set()
        changed.wait(LONGEST_CHANGE_S)
        torch.set_num_threads(of_the_process)

    with _changing:
        helper = threading.Thread(target=put_back, name="batch_manager thread count", daemon=True)
        helper.start()
        ready.wait()
        try:
            torch.set_num_threads(count)
        finally:
            changed.set()
            helper.join()


def _forget_who_changes() -> None:
    """In a forked child, where whoever held the lock is not."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_forget_who_changes)
