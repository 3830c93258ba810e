"""An event that is set once wakes every waiting thread, also if a wait is interrupted as it wakes."""

import threading

from batch_manager.one_shot_event import OneShotEvent


def waiting(event, count, seconds=60.0):
    results = []
    threads = [threading.Thread(target=lambda: results.append(event.wait(seconds)), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_all_waiting_threads_wake():
    event = OneShotEvent()
    threads, results = waiting(event, 5)
    event.set()
    event.set()
    for thread in threads:
        thread.join(10)
    assert results == [True] * 5 and event.wait(0)


def test_a_wake_up_that_an_interrupted_wait_did_not_pass_on_is_no_hang():
    """C14: the lock stays held, as Ctrl-C leaves it in the thread that the event woke first."""
    event = OneShotEvent()
    threads, results = waiting(event, 3)
    event.is_set = True
    for thread in threads:
        thread.join(10)
    assert results == [True] * 3


def test_a_wait_ends_after_its_time():
    event = OneShotEvent()
    assert [event.wait(seconds) for seconds in (0, -1, 0.01)] == [False] * 3
