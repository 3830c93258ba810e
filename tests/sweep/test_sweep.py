"""T4 in short: every fault point three times, a sample of the places for an exception, every way to end once."""

import subprocess
import sys

import pytest

from .interrupted import interrupted, sweep_rows
from .interrupted import sweep as sweep_places
from .points import POINTS, scenarios_of
from .points import sweep as sweep_point
from .scenarios import SCENARIOS, Run

EVERY = 211


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_wrong_without_a_fault(name):
    run = Run(SCENARIOS[name])
    run.start()
    assert run.faults() == []
    assert run.loop.failure is None and len(run.finals) > 1


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS.keys())
def test_a_point_that_fails_costs_nobody_an_answer(point):
    for scenario in scenarios_of(point):
        runs, struck, wrong = sweep_point(scenario, point, most_times=3)
        assert struck, f"{scenario} never passes there"
        assert wrong == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython looks for exceptions elsewhere from here on")
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_exception_anywhere_costs_nobody_an_answer(name):
    places, tried, wrong = sweep_places(name, lambda place, frame: place % EVERY == len(name))
    assert tried > 10
    assert wrong == []
    struck, wrong = sweep_rows(name, places, 5, seed=0)
    assert struck >= 10
    assert wrong == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython looks for exceptions elsewhere from here on")
@pytest.mark.parametrize("name", ["mixed", "generator"])
def test_no_place_where_items_move_costs_anybody_an_answer(name):
    """All places of these files, where the test above takes a sample of all."""
    files = ("callbacks.py", "fetched_items.py", "guard.py", "unanswered.py")
    _, tried, wrong = sweep_places(name, lambda place, frame: frame.f_code.co_filename.endswith(files))
    assert tried > 500
    assert wrong == []


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
