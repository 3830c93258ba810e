"""Tests of worker code that otherwise runs only in a race of threads or in a forked child."""

import threading

import pytest

from batch_manager.clock import SystemClock
from batch_manager.forked_child import _status
from batch_manager.worker import WorkerControl, run_worker


class Wake:
    """A wake event that stops the worker at its third wait, as a constructor that failed does."""

    def __init__(self, control: WorkerControl) -> None:
        self.control, self.waits = control, 0

    def wait_and_clear(self, seconds: float) -> None:
        self.waits += 1
        if self.waits == 3:
            self.control.stopped.set()


class Untouchable:
    def __getattribute__(self, name):
        raise AssertionError(f"the worker touched {name} of a loop that another thread closes")


def test_c14_a_worker_whose_constructor_failed_leaves_the_loop_alone_until_it_is_closed():
    control = WorkerControl(SystemClock(), hang_warning_s=0.0)
    control.wake = Wake(control)
    constructor = threading.Thread(target=control.claim_the_loop)
    constructor.start()
    constructor.join(60)
    run_worker(Untouchable(), control, idle_poll_interval_s=0.0)
    assert control.wake.waits == 3 and control.interruption is None


@pytest.mark.parametrize("error, status", [
    (None, 0), (SystemExit(), 0), (SystemExit(None), 0), (SystemExit(3), 3), (SystemExit("said aloud"), 1),
    (ValueError("x"), 1), (KeyboardInterrupt(), 1)])
def test_c18_a_child_forked_in_a_callback_ends_as_a_process_ends_that_raises(error, status):
    assert _status(error) == status
