"""T4 in short: each request gets one final response after a fault at a point, at a place, or at the end of a process.

points.py defines points, interrupted.py places, and processes.py ends of a process. Each point has three faults, the
places are a sample, and each kind of process end occurs once.
"""

import subprocess
import sys

import pytest

from batch_manager.guard import Guard
from batch_manager.loop.callbacks import GuardedCallbacks
from tests.harness.small_process import small_process

from .interrupted import Injected, Tracer, interrupted, sweep_rows, sweep_sample, sweep_where_items_move
from .points import POINTS, scenarios_of
from .points import sweep as sweep_point
from .scenarios import SCENARIOS, Run


@pytest.fixture(scope="module")
def call():
    with small_process() as call:
        yield call


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_wrong_without_a_fault(name):
    run = Run(SCENARIOS[name])
    run.start()
    assert run.faults() == []
    assert run.loop.failure is None and len(run.final_ids) > 1


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS.keys())
def test_a_point_that_fails_costs_nobody_an_answer(point):
    for scenario in scenarios_of(point):
        runs, struck, wrong = sweep_point(scenario, point, most_times=3)
        assert struck, f"{scenario} never passes there"
        assert wrong == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython looks for exceptions elsewhere from here on")
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_exception_anywhere_costs_nobody_an_answer(call, name):
    places, tried, wrong = call(sweep_sample, name)
    assert tried > 10
    assert wrong == []
    struck, wrong = sweep_rows(name, places, 5, seed=0)
    assert struck >= 10
    assert wrong == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython looks for exceptions elsewhere from here on")
@pytest.mark.parametrize("name", ["mixed", "generator"])
def test_no_place_where_items_move_costs_anybody_an_answer(call, name):
    """Each request gets one final response after an exception at any place of the files that move items."""
    _, tried, wrong = call(sweep_where_items_move, name)
    assert tried > 450
    assert wrong == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython looks for exceptions elsewhere from here on")
def test_no_streamed_response_is_lost_or_repeated_between_callbacks():
    def struck(number, frame):
        if number == place:
            places.append(place)
            raise Injected

    places, received = [], []
    for place in range(1, 1000):
        received.clear()
        is_done = False
        callbacks = GuardedCallbacks(list, lambda *response: received.append(response[0]), None, None, Guard(), 4096)
        sys.settrace(Tracer(struck))
        try:
            callbacks.send([(request_id, []) for request_id in range(3)])
            is_done = True
        except Injected:
            pass
        finally:
            sys.settrace(None)
        assert received == list(range(3 if is_done else len(received)))
        if len(places) < place:
            break
    assert len(places) > 15


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython looks for exceptions elsewhere from here on")
def test_a_row_of_exceptions_strikes_as_often_as_it_says():
    where, wrong = interrupted("mixed", 3000, [1] * 5)
    assert len(where) == 6 and wrong == []
    where, wrong = interrupted("mixed", 3000, [1] * 20)
    assert len(where) > 6 and "C14: the exception left the worker" in wrong


def test_every_way_a_process_can_end():
    result = subprocess.run([sys.executable, "-m", "tests.sweep.processes", "all"], capture_output=True, text=True,
                            timeout=300)
    assert result.returncode == 0, result.stdout
