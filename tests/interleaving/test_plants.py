"""Each planted bug is found, the schedule that found it does so again, and the scenario passes without the bug."""

import pytest

from . import real_threads
from .explore import Run, from_text, run, systematic, to_text
from .plants import PLANTS, planted
from .scheduler import Scheduler


def find(name: str) -> Run | None:
    """Return the first run that shows the bug, with the fewest preemptions that suffice; None if no run shows it."""
    plant = PLANTS[name]
    return next((done for done in systematic(plant.scenario, plant.preemptions) if done.violations), None)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found_and_its_schedule_shows_it_again(name):
    with planted(name):
        found = find(name)
        assert found is not None
        again = run(found.scenario, from_text(to_text(found.schedule)))
    assert again.violations == found.violations
    assert not run(found.scenario).violations, "without the bug the scenario is clean"


def test_a_planted_bug_is_found_on_real_threads_too():
    with planted("shutdown_leaves_the_watchdog"):
        _, wrong = real_threads.run_for(10.0, ["the_watchdog_watches"])
    assert wrong and "watchdog is alive" in wrong[0]


def deadlock(scheduler: Scheduler) -> None:
    def wait_for(held: list, wanted: list) -> None:
        held.append(1)
        scheduler.wait("the other", lambda: len(wanted) > 1)

    one, two = [], []
    scheduler.start_task("other", lambda: wait_for(one, two))
    wait_for(two, one)


def no_end(scheduler: Scheduler) -> None:
    while True:
        scheduler.wait("nothing", lambda: False, 1.0)


def an_exception(scheduler: Scheduler) -> None:
    raise ValueError("of the scenario")


@pytest.mark.parametrize(("main", "says"), [
    (deadlock, "deadlock: nobody can run; waiting: main, other"),
    (no_end, "no end"),
    (an_exception, "main raised ValueError: of the scenario"),
])
def test_the_scheduler_tells_what_is_wrong_with_a_run(main, says):
    scheduler = Scheduler()
    scheduler.run(lambda: main(scheduler))
    (violation,) = scheduler.violations
    assert violation.startswith(says)


def count_up(schedule: dict[int, str]) -> tuple[list[int], Scheduler]:
    """Run two tasks that each read a shared number, yield, and write the number plus one.

    Returns ([the number at the end], the scheduler).
    """
    scheduler, numbers = Scheduler(schedule), [0]

    def add() -> None:
        number = numbers[0]
        scheduler.point("has read")
        numbers[0] = number + 1

    def main() -> None:
        scheduler.start_task("other", add)
        add()

    scheduler.run(main)
    return numbers, scheduler


def test_a_schedule_decides_who_goes_on():
    assert count_up({})[0] == [2]
    numbers, scheduler = count_up({0: "other"})
    assert numbers == [1], "both have read before one wrote"
    assert scheduler.schedule == {0: "other"}


def test_a_schedule_of_other_code_is_refused():
    assert "is not of this code" in count_up({0: "nobody"})[1].violations[0]


def test_the_same_schedule_makes_the_same_decisions():
    name = "the_interpreter_ends_with_a_manager_that_ends_by_itself/lines"
    assert run(name).decisions == run(name).decisions
