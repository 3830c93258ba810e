"""C17: an interrupt while the constructor loads a model leaves no thread, backend or model."""

import threading
import time

import pytest

from batch_manager import GptManager, Parts, SchedulerPolicy, TrtGptModelType, interpreter_exit, loading_thread
from batch_manager.errors import ManagerClosedError
from batch_manager.loading_thread import Loading, check_interruption, load_in_own_thread
from batch_manager.testing.scripted_backend import ScriptedBackend


@pytest.fixture
def interrupted(monkeypatch):
    """Return a list of one number: how many of the next waits for the loading thread raise KeyboardInterrupt."""
    left, wait = [0], Loading.wait

    def interrupted_wait(self):
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt("of the caller")
        wait(self)

    monkeypatch.setattr(Loading, "wait", interrupted_wait)
    return left


def endless():
    while True:
        check_interruption()
        time.sleep(0.001)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_c17_an_interrupt_reaches_what_loads_and_passes_when_that_has_ended(interrupted, times):
    """An interrupt stops the loading. The caller gets the KeyboardInterrupt after the loading thread has ended."""
    interrupted[0] = times
    with pytest.raises(KeyboardInterrupt, match="of the caller"):
        load_in_own_thread(endless, undo=lambda loaded: pytest.fail("nothing was loaded"))
    assert not [thread for thread in threading.enumerate() if thread.name == "batch_manager loading"]


def test_c17_what_was_loaded_all_the_same_is_undone(interrupted):
    """If the loading completes despite an interrupt, its result is passed to `undo`."""
    interrupted[0], undone = 1, []
    with pytest.raises(KeyboardInterrupt, match="of the caller"):
        load_in_own_thread(lambda: time.sleep(0.05) or "a model", undone.append)
    assert undone == ["a model"]


def test_c17_the_backend_of_an_interrupted_constructor_is_closed(interrupted, new_client):
    class Closing(ScriptedBackend):
        closed = 0

        def close(self):
            Closing.closed += 1

    interrupted[0], client = 1, new_client()
    with pytest.raises(KeyboardInterrupt):
        GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, client.get,
                   client.send, parts=Parts(backend=Closing))
    assert Closing.closed == 1 and not client.asked


def test_c17_the_end_of_the_interpreter_interrupts_what_loads(monkeypatch):
    monkeypatch.setattr(interpreter_exit, "_controls", {})
    monkeypatch.setattr(interpreter_exit, "_is_exiting", False)
    ending = threading.Timer(0.05, interpreter_exit._abort_all_workers)
    ending.start()
    with pytest.raises(ManagerClosedError, match="the interpreter is exiting"):
        load_in_own_thread(endless, undo=lambda loaded: None)
    with pytest.raises(ManagerClosedError):                      # the exit has begun already
        load_in_own_thread(endless, undo=lambda loaded: None)
    ending.join(60)
    assert not interpreter_exit._controls


def test_what_is_loaded_and_what_is_raised_are_handed_on():
    assert load_in_own_thread(lambda: threading.current_thread().name, undo=None) == "batch_manager loading"
    with pytest.raises(ZeroDivisionError):
        load_in_own_thread(lambda: 1 / 0, undo=None)
    check_interruption()                                          # this thread is not interrupted


def test_a_load_may_take_longer_than_one_look_at_it(monkeypatch):
    monkeypatch.setattr(loading_thread, "SECONDS_BETWEEN_LOOKS", 0.01)
    assert load_in_own_thread(lambda: time.sleep(0.1) or 5, undo=None) == 5


def test_c17_a_thread_that_cannot_be_started_leaves_nothing_behind(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Loading, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        load_in_own_thread(lambda: 5, undo=lambda loaded: pytest.fail("nothing was loaded"))
    assert not [control for control in interpreter_exit._controls if isinstance(control, Loading)]
