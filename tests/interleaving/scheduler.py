"""Runs the threads of a test one at a time and chooses at each yield point which thread runs next.

A thread of the test is a *task*: a real thread that waits at its own gate until it is chosen. At a yield point the
running task chooses the next task, opens that task's gate and waits at its own. Nothing else affects the order, so the
same choices repeat a run.

Two choices are not tasks. `clock` lets the earliest deadline of a waiting task pass. `interrupt` runs a function inside
the running task, as the garbage collector or a signal does.

By default, a task runs until it must wait. The oldest task that can run is next. If no task can run, the clock moves.
A *schedule* holds the choices that differ from the default: {number of the decision: choice}. Only yield points with
more than one option have a number.
"""

import _thread
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn

from tests.harness.clock import VirtualClock

CLOCK, INTERRUPT = "clock", "interrupt"
MOST_DECISIONS = 5_000
MOST_FORCED_MOVES = 40
SECONDS_UNTIL_STUCK = 30.0


class Abandoned(BaseException):
    """Raised in each unfinished task when the run is over, to end the task."""


@dataclass(slots=True)
class Decision:
    """A choice at one yield point.

    options         the possible choices, the default first
    is_preempting   whether every option except the default costs a preemption
    """

    options: list[str]
    chosen: str
    is_preempting: bool


@dataclass(eq=False, slots=True)
class Task:
    """A thread of the test.

    ready      the condition that the task waits for, until `deadline`; None while the task can run
    """

    name: str
    gate: "_thread.LockType" = field(default_factory=_thread.allocate_lock)
    ready: Callable[[], bool] | None = None
    deadline: float | None = None
    has_finished: bool = False


class Scheduler:
    """Runs the tasks of one run, one at a time.

    clock           the clock of the tasks and of the engine
    forced_moves    number of times that the clock moved because no task could run
    decisions       the choices so far, with their options
    violations      faults of the run itself: deadlocks, endless runs, exceptions of a task
    when_abandoned  called before `Abandoned` is raised in a task, to end code that contains all exceptions
    """

    def __init__(self, schedule: Mapping[int, str] | None = None, random: Random | None = None,
                 watched_files: frozenset[str] = frozenset()) -> None:
        self._schedule = dict(schedule or {})
        self._random = random
        self._rate = random.choice((0.02, 0.1, 0.3)) if random else 0.0
        self._watched_files = watched_files
        self._tasks: list[Task] = []
        self._by_thread: dict[int, Task] = {}
        self._current: Task | None = None
        self._is_over = _thread.allocate_lock()
        self._is_over.acquire()
        self._is_abandoned = False
        self._frozen: set[str] = set()
        self.interrupt: Callable[[], None] | None = None
        self.interrupts_only: str | None = None
        self.clock = VirtualClock()
        self.forced_moves = 0
        self.decisions: list[Decision] = []
        self.violations: list[str] = []
        self.log: list[str] | None = None
        self.when_abandoned: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ for the run

    def run(self, main: Callable[[], None]) -> None:
        """Start a task that runs `main`, and return when all tasks have ended or none can run."""
        self._current = self.start_task("main", main)
        self._current.gate.release()
        if not self._is_over.acquire(timeout=SECONDS_UNTIL_STUCK):
            self.violations.append(f"stuck: {self._current.name} waits for something outside this scheduler")
            self._is_abandoned = True

    @property
    def schedule(self) -> dict[int, str]:
        """The schedule that repeats this run: the choices that differ from the default."""
        return {number: decision.chosen for number, decision in enumerate(self.decisions)
                if decision.chosen != decision.options[0]}

    def start_task(self, name: str, function: Callable[[], None]) -> Task:
        names = [task.name for task in self._tasks]
        if name in names:
            name = next(f"{name}-{number}" for number in range(2, 99) if f"{name}-{number}" not in names)
        task = Task(name)
        task.gate.acquire()
        self._tasks.append(task)
        _thread.start_new_thread(self._body, (task, function))    # not by `threading`: its lines may be watched
        return task

    def freeze(self, name: str) -> None:
        """Never run a task again, as happens to a daemon thread when the interpreter ends."""
        self._frozen.add(name)

    def current_task(self) -> Task | None:
        """The task of the calling thread; None if it has none."""
        return self._by_thread.get(_thread.get_ident())

    # ------------------------------------------------------------------ yield points

    def point(self, what: str) -> None:
        """A yield point: another task may run before this call returns. `what` describes the point in the log."""
        task = self.current_task()
        if task is not None:
            self._note(task, what)
            self._switch(task)

    def wait(self, what: str, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `ready()`, at most `seconds`. Returns False after a timeout."""
        task = self.current_task()
        if task is None:
            return ready()
        self._note(task, what)
        task.ready = ready
        task.deadline = None if seconds is None else self.clock.now + max(seconds, 0.0)
        self._switch(task)
        task.ready = task.deadline = None
        return ready()

    # ------------------------------------------------------------------ inside

    def _note(self, task: Task, what: str) -> None:
        if self.log is not None:
            self.log.append(f"{len(self.decisions):>5} {self.clock.now:>9.3f} {task.name:<10} {what}")

    def _body(self, task: Task, function: Callable[[], None]) -> None:
        self._by_thread[_thread.get_ident()] = task
        task.gate.acquire()
        if self._watched_files:
            sys.settrace(self._trace_call)
        try:
            if not self._is_abandoned:
                function()
        except Abandoned:
            pass
        except BaseException as error:
            if not self._is_abandoned:
                self.violations.append(f"{task.name} raised {type(error).__name__}: {error}")
        finally:
            sys.settrace(None)
            task.has_finished = True
            del self._by_thread[_thread.get_ident()]
            self._hand_over(task)

    def _trace_call(self, frame, event, argument):
        return self._trace_line if frame.f_code.co_filename in self._watched_files else None

    def _trace_line(self, frame, event, argument):
        if event == "line":
            self.point(f"line {frame.f_lineno} of {frame.f_code.co_name}")
        return self._trace_line

    def _switch(self, task: Task) -> None:
        """Choose the next task and let it run. Returns when `task`, the calling one, is chosen again."""
        if self._is_abandoned:
            self._abandon()
        while (chosen := self._choose(task)) == INTERRUPT:
            function, self.interrupt = self.interrupt, None
            waits_for, task.ready, deadline, task.deadline = task.ready, None, task.deadline, None
            function()
            task.ready, task.deadline = waits_for, deadline
        if chosen is not task:
            self._current = chosen
            if chosen is None:
                self._is_abandoned = True    # the other tasks end one by one
            else:
                chosen.gate.release()
                task.gate.acquire()
        if self._is_abandoned:
            self._abandon()

    def _abandon(self) -> NoReturn:
        self.when_abandoned()
        raise Abandoned

    def _hand_over(self, task: Task) -> None:
        """Choose the next task and let it run, after `task` has ended. End the run if no task is left."""
        unfinished = [other for other in self._tasks if not other.has_finished]
        if not unfinished:
            self._is_over.release()
            return
        if all(other.name in self._frozen for other in unfinished):
            self._is_abandoned = True
        chosen = None if self._is_abandoned else self._choose(task)
        if chosen is None:
            self._is_abandoned = True
            chosen = unfinished[0]
        self._current = chosen
        chosen.gate.release()

    def _can_run(self, task: Task) -> bool:
        return (not task.has_finished and task.name not in self._frozen
                and (task.ready is None or (task.deadline is not None and task.deadline <= self.clock.now)
                     or task.ready()))

    def _choose(self, current: Task) -> Task | str | None:
        """Return the next task, or INTERRUPT to interrupt `current`, or None after a violation."""
        while True:
            able = [task for task in self._tasks if self._can_run(task)]
            deadlines = [task.deadline for task in self._tasks
                         if task.deadline is not None and task.deadline > self.clock.now
                         and task.name not in self._frozen]
            if not able and not deadlines:
                waiting = ", ".join(task.name for task in self._tasks
                                    if not task.has_finished and task.name not in self._frozen)
                self.violations.append(f"deadlock: nobody can run; waiting: {waiting}")
                return None
            if not able:
                self.forced_moves += 1
                if self.forced_moves > MOST_FORCED_MOVES:
                    self.violations.append("no end: the clock moves and moves, and nobody gets on")
                    return None
                self.clock.now = min(deadlines)
                continue

            if current in able:
                able.remove(current)
                able.insert(0, current)
            options = [task.name for task in able]
            if deadlines:
                options.append(CLOCK)
            if self.interrupt is not None and current is able[0] and self.interrupts_only in (None, current.name):
                options.append(INTERRUPT)
            name = options[0] if len(options) == 1 else self._decide(options, current is able[0])
            if name is None:
                return None
            if name == CLOCK:
                self.clock.now = min(deadlines)
                continue
            return name if name == INTERRUPT else next(task for task in able if task.name == name)

    def _decide(self, options: list[str], is_preempting: bool) -> str | None:
        number = len(self.decisions)
        if number == MOST_DECISIONS:
            self.violations.append(f"no end after {number} decisions")
            return None
        chosen = self._schedule.get(number, options[0])
        if self._random is not None and self._random.random() < (self._rate if is_preempting else 0.5):
            chosen = self._random.choice(options)
        if chosen not in options:
            self.violations.append(f"this schedule is not of this code: decision {number} is between {options}, "
                                   f"not {chosen}")
            return None
        self.decisions.append(Decision(options, chosen, is_preempting))
        return chosen
