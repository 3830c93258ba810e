"""T10, the quick part: every schedule with one preemption, some random ones, and a few seconds on real threads.

`python -m tests.campaigns --suite T10` runs more. `python -m tests.interleaving.replay` repeats one schedule.
"""

import sys
import sysconfig

import pytest

from . import real_threads
from .explore import at_random, report, systematic
from .scenarios import SCENARIOS

PREEMPTIONS = 1
RANDOM_SCHEDULES = 5
# These run in the campaign only.
LARGE = {"one_of_two_managers_ends", "two_managers_end_each_other", "everybody_waits_for_the_terminate_request"}
SECONDS_ON_REAL_THREADS = 2.0


def names(*, lines: bool) -> list[str]:
    return [name for name in SCENARIOS if name.endswith("/lines") == lines and name not in LARGE]


@pytest.mark.parametrize("name", names(lines=False))
def test_nothing_goes_wrong_in_any_schedule_with_one_preemption(name):
    for run in systematic(name, PREEMPTIONS):
        assert not run.violations, report(run)


@pytest.mark.parametrize("name", names(lines=True))
def test_nothing_goes_wrong_when_threads_are_interrupted_at_random_lines(name):
    for run in at_random(name, 0, RANDOM_SCHEDULES):
        assert not run.violations, report(run)


def test_nothing_goes_wrong_on_real_threads_that_are_switched_all_the_time():
    runs, wrong = real_threads.run_for(SECONDS_ON_REAL_THREADS)
    assert runs and not wrong, wrong


def test_nothing_goes_wrong_without_a_global_interpreter_lock():
    if not sysconfig.get_config_var("Py_GIL_DISABLED") or sys._is_gil_enabled():
        pytest.skip("this interpreter is not a free-threaded one")
    runs, wrong = real_threads.run_for(SECONDS_ON_REAL_THREADS)
    assert runs and not wrong, wrong
