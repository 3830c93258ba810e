"""Makes each named point of the engine fail at its n-th call, or at its n-th call and at each call after it.

    python -m tests.sweep.points SCENARIO POINT TIME once|always      repeats one fault

A point is a function that the loop depends on. It fails at its n-th call, for n = 1, 2, 3 ... until a run has fewer
than n calls. After each run, the history checker checks the calls (I1..I8). If the engine did not fail, the accounting
of the KV cache is audited.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from batch_manager.errors import DeviceLostError, OutOfResourceError
from batch_manager.kv.block_pool import OutOfBlocksError

from .scenarios import SCENARIOS, Run

MOST_TIMES = 10_000


class Planted(Exception):
    """The exception that a failing point raises by default."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point at which the engine can fail.

    spoils(run, fail)   makes the point call `fail` each time the run reaches the point
    raises              types of the exceptions that `fail` raises, one type per run
    in_callback         whether the point is a user's callback, whose exception must not fail the engine
    """

    name: str
    spoils: Callable[[Run, Callable[[], None]], None]
    raises: tuple[type[BaseException], ...] = (Planted,)
    in_callback: bool = False


def _callback(name: str) -> Callable:
    return lambda run, fail: run.spoiled.__setitem__(name, fail)


def _before(owner: Callable[[Run], Any], method: str) -> Callable:
    """Return a `spoils` function that makes a method of an object of the run fail before it does anything.

    owner   (run) -> the object
    """
    def spoil(run: Run, fail: Callable[[], None]) -> None:
        whole, target = getattr(owner(run), method), owner(run)

        def failing(*arguments: Any, **named: Any) -> Any:
            fail()
            return whole(*arguments, **named)

        setattr(target, method, failing)
    return spoil


def _finish(run: Run, fail: Callable[[], None]) -> None:
    """Make the step fail when it is read."""
    run.backend.on_finish = lambda batch: fail()


def _late_step(run: Run, fail: Callable[[], None]) -> None:
    """Make the step fail while it runs: at its launch or, on an asynchronous device, after later launches."""
    run.backend.on_step = lambda batch: fail()


DEVICE, LOOP = (lambda run: run.backend), (lambda run: run.loop)
KV, ANYBODY = (lambda run: run.loop.kv), (Planted, SystemExit, KeyboardInterrupt)

POINTS: dict[str, Point] = {point.name: point for point in [
    Point("get", _callback("get"), ANYBODY, in_callback=True),
    Point("get, between items", _callback("item"), ANYBODY, in_callback=True),
    Point("send", _callback("send"), ANYBODY, in_callback=True),
    Point("poll", _callback("poll"), ANYBODY, in_callback=True),
    Point("stats", _callback("stats"), ANYBODY, in_callback=True),

    Point("model start", _before(DEVICE, "start"), (Planted, MemoryError, SystemExit)),
    Point("model finish", _finish, (Planted, MemoryError, SystemExit)),
    Point("device lost at start", _before(DEVICE, "start"), (DeviceLostError,)),
    Point("device lost at finish", _finish, (DeviceLostError,)),
    Point("copy or clear blocks", _before(DEVICE, "_carry_out")),
    Point("late model step", _late_step, (Planted, MemoryError, SystemExit)),
    Point("memory usage", _before(DEVICE, "memory_usage")),
    Point("close", _before(DEVICE, "close")),

    Point("claim", _before(KV, "claim"), (OutOfBlocksError, OutOfResourceError, Planted)),
    Point("take blocks", _before(lambda run: run.loop.kv.pool, "take"), (OutOfBlocksError, Planted)),
    Point("publish", _before(KV, "publish_context")),
    Point("release", _before(KV, "release")),
    Point("scheduler", _before(lambda run: run.loop.scheduler, "schedule_request"), (Planted, SystemExit)),

    Point("admission", _before(lambda run: run.loop.intake.admission, "admit"), (Planted, SystemExit)),
    Point("response", _before(lambda run: run.loop.deliveries, "response")),
    Point("streamed responses", _before(lambda run: run.loop.deliveries, "new_tokens")),
    Point("note of pending device work", _before(lambda run: run.loop._resources.device_work, "update_tables")),
    Point("take back", _before(lambda run: run.loop._resources, "unclaim")),
    Point("trace", _before(lambda run: run.loop.reporter, "trace")),
    Point("time stamp", _before(lambda run: run.clock, "timestamp")),
    Point("clock", _before(lambda run: run.clock, "monotonic"), ANYBODY),
]}


def spoiled(scenario: str, name: str, time: int, always: bool, raises: type[BaseException]) -> tuple[Run, int]:
    """Run a scenario in which the point `name` fails at call number `time`, and if `always`, at all later calls.

    Returns (the run, number of failures).
    """
    passed = failed = 0

    def fail() -> None:
        nonlocal passed, failed
        passed += 1
        if passed == time or (always and passed > time):
            failed += 1
            raise raises("planted")

    run = Run(SCENARIOS[scenario])
    POINTS[name].spoils(run, fail)
    run.start()
    return run, failed


def faults(run: Run, point: Point) -> list[str]:
    """Return a message for each rule that the run broke after `point` failed."""
    found = [fault for fault in run.faults() if not (point.name == "admission" and "is fair and was refused" in fault)]
    if point.in_callback and run.loop.failure is not None:
        found.append(f"C15: a callback that raised failed the engine: {run.loop.failure}")
    return found


def scenarios_of(point: Point) -> tuple[str, ...]:
    """Return the shortest scenarios that reach the point."""
    return {"get, between items": ("generator",), "publish": ("reused",),
            "copy or clear blocks": ("reused", "beams", "not finite", "runs ahead, late fault"),
            "take back": ("runs ahead, late fault",), "streamed responses": ("mixed", "chunked"),
            "late model step": ("runs ahead", "mixed")}.get(point.name, ("mixed", "paused", "runs ahead"))


def variants(point: Point) -> Iterator[tuple[bool, type[BaseException]]]:
    for raises in point.raises:
        yield False, raises
        yield True, raises


def sweep(scenario: str, point: Point, most_times: int = MOST_TIMES) -> tuple[int, int, list[str]]:
    """Make a point fail at each of its calls in a scenario, one call per run, up to call number `most_times`.

    Returns (number of runs, number of failures, violations).
    """
    runs = struck = 0
    wrong = []
    for always, raises in variants(point):
        for time in range(1, most_times + 1):
            run, failed = spoiled(scenario, point.name, time, always, raises)
            runs, struck = runs + 1, struck + failed
            found = faults(run, point)
            if found:
                how = "always" if always else "once"
                wrong.append(f"{scenario}, {point.name}, {raises.__name__}: {found[0]}: python -m tests.sweep.points "
                             f"'{scenario}' '{point.name}' {time} {how} {raises.__name__}")
            if not failed:
                break
    return runs, struck, wrong


def main() -> int:
    scenario, name, time, how, *kind = sys.argv[1:]
    point = POINTS[name]
    raises = next((raises for raises in point.raises if [raises.__name__] == kind), point.raises[0])
    run, failed = spoiled(scenario, name, int(time), how == "always", raises)
    wrong = faults(run, point)
    print(f"failed {failed} times\n" + ("\n".join(wrong) or "nothing is wrong"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
