"""Runs the scenarios on real threads, which the interpreter switches as often as it can.

RealTime replaces the scheduler and uses real time. RealThreading replaces doubles.Threading and uses the real
`threading`. All rules of world.py are checked, except those that need the virtual clock.
"""

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batch_manager.clock import SystemClock

from .doubles import managers_over
from .scenarios import SCENARIOS
from .world import InterleavedWorld, run_once

SWITCH_INTERVAL_S = 1e-6
SECONDS_UNTIL_DEADLOCKED = 5.0
CPU_SECONDS_OF_A_DEADLOCK = 0.02     # the most that a deadlocked process uses in SECONDS_UNTIL_DEADLOCKED
SECONDS_UNTIL_GIVEN_UP = 60.0


def has_ended(thread: threading.Thread) -> bool:
    """Wait for a thread to end. Returns False if it does not.

    The wait is over if the process uses almost no CPU time for SECONDS_UNTIL_DEADLOCKED, or after
    SECONDS_UNTIL_GIVEN_UP.
    """
    deadline = time.monotonic() + SECONDS_UNTIL_GIVEN_UP
    while time.monotonic() < deadline:
        before = time.process_time()
        thread.join(SECONDS_UNTIL_DEADLOCKED)
        if not thread.is_alive():
            return True
        if time.process_time() - before < CPU_SECONDS_OF_A_DEADLOCK:
            return False
    return False


class RealTime:
    """The part of Scheduler that InterleavedWorld uses, in real time. The operating system schedules the threads."""

    forced_moves = 0
    interrupt: Callable[[], None] | None = None
    interrupts_only: str | None = None

    def __init__(self, random_pauses: random.Random) -> None:
        self.clock = SystemClock()
        self.violations: list[str] = []
        self._random = random_pauses

    def point(self, what: str) -> None:
        """Yield to other threads at 5 % of the calls."""
        if self._random.random() < 0.05:
            time.sleep(0)

    def run(self, main: Callable[[], None]) -> None:
        def body() -> None:
            try:
                main()
            except BaseException as error:
                self.violations.append(f"main raised {type(error).__name__}: {error}")

        thread = threading.Thread(target=body, name="scenario", daemon=True)
        thread.start()
        if not has_ended(thread):
            self.violations.append(f"deadlock: main does not come to its end, {SECONDS_UNTIL_DEADLOCKED:.0f} s idle")


class RealThreading:
    """The real `threading`, with the hooks of doubles.Threading."""

    Lock, Event = staticmethod(threading.Lock), threading.Event
    current_thread = staticmethod(threading.current_thread)
    TIMEOUT_MAX = threading.TIMEOUT_MAX
    get_ident = staticmethod(threading.get_ident)

    def __init__(self) -> None:
        family = self
        self.threads: list[threading.Thread] = []
        self.before_start: Callable[[threading.Thread], None] = lambda thread: None
        self.after_start: Callable[[threading.Thread], None] = lambda thread: None

        class Thread(threading.Thread):
            def start(self) -> None:
                family.before_start(self)
                super().start()
                family.threads.append(self)
                family.after_start(self)

            @property
            def has_finished(self) -> bool:
                return self.ident is not None and not self.is_alive()

            def freeze(self) -> None:
                """Do nothing, because only the end of the process stops a real thread."""

        self.Thread = Thread

    def join_all(self) -> None:
        for thread in self.threads:
            if not has_ended(thread):
                break    # the rules report it


@contextmanager
def switched_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run(name: str, seed: int) -> list[str]:
    """Run the scenario `name` once, with random pauses from `seed`. Returns the violations."""
    scenario, threads = SCENARIOS[name], RealThreading()

    def body(world: InterleavedWorld) -> None:
        scenario.body(world)
        threads.join_all()

    with managers_over(threads):
        return run_once(body, RealTime(random.Random(seed)), threads)


def timeless() -> list[str]:
    return [name for name, scenario in SCENARIOS.items() if "/" not in name and scenario.is_timeless]


def run_for(seconds: float, names: list[str] | None = None) -> tuple[int, list[str]]:
    """Run scenarios in turn for `seconds` seconds, or until one fails. Returns (number of runs, violations)."""
    names = names or timeless()
    deadline, runs, wrong = time.monotonic() + seconds, 0, []
    with switched_often():
        while time.monotonic() < deadline and not wrong:
            name = names[runs % len(names)]
            wrong = [f"{violation}\nagain, with luck: python -m tests.interleaving.real_threads --scenario {name}"
                     for violation in run(name, runs)]
            runs += 1
    return runs, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interleaving.real_threads",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--scenario", choices=timeless(), action="append", help="this one only; may be repeated")
    options = parser.parse_args()
    runs, wrong = run_for(options.seconds, options.scenario)
    print(f"{runs:,} runs")
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
