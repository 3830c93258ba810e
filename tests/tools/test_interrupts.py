"""Ctrl-C ends a program that runs an engine's loop on the main thread, between two steps."""

import os
import signal
import threading

import pytest

from batch_manager import SchedulerPolicy, TrtGptModelOptionalParams
from batch_manager.tools.draw.demo import DemoRequest, run_demo
from batch_manager.tools.host_bench import Setting, measure
from batch_manager.tools.interrupts import interrupts_between_steps


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_check():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_between_steps() as check:
        check()
        press()
        done.append("the step goes on")
        check()
        done.append("never")
    assert done == ["the step goes on"]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_an_interrupt_in_the_last_step_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt), interrupts_between_steps():
        press()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_process_that_handles_interrupts_itself_does_so(handler):
    signal.signal(signal.SIGINT, handler)
    with interrupts_between_steps() as check:
        assert signal.getsignal(signal.SIGINT) is handler
        press()
        check()


def test_another_thread_changes_no_handler():
    found = []

    def inside():
        with interrupts_between_steps() as check:
            check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join(60)
    assert found == [signal.default_int_handler]


def measure_the_host():
    measure(Setting(batch=64, iterations=50_000, streaming=True, policy="guaranteed_no_evict"))


def draw_a_demonstration():
    requests = [DemoRequest(20, 20_000) for _ in range(8)]
    run_demo(requests, TrtGptModelOptionalParams(max_batch_size=8), SchedulerPolicy.MAX_UTILIZATION, 10_000)


@pytest.mark.parametrize("run", [measure_the_host, draw_a_demonstration])
@pytest.mark.parametrize("milliseconds", [5, 20, 33, 50, 80])
def test_ctrl_c_ends_a_program_whose_time_is_spent_in_callbacks_and_the_backend(run, milliseconds):
    """Callbacks and steps contain exceptions."""
    timer = threading.Timer(milliseconds / 1e3, press)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        try:
            run()
        finally:
            timer.join(60)    # a late interrupt ends here, and not in pytest
