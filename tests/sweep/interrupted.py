"""Raises an exception at each place where CPython can raise an asynchronous exception of another thread.

    python -m tests.sweep.interrupted SCENARIO PLACE [GAP ...]      repeats one place and prints it

CPython 3.11 to 3.13 check for an exception of PyThreadState_SetAsyncExc at three kinds of places, and never inside a C
function: where a Python function begins or continues after a yield (RESUME), after a call (CALL, CALL_FUNCTION_EX), and
where a loop jumps back (JUMP_BACKWARD and its variants). A tracer counts these places while a scenario runs in the code
of batch_manager. At each place the process forks. The child raises the exception there and runs to its end without the
tracer. Each place is tried in the state that the run has there, for the cost of a fork and the rest of the run.

GAP: another exception is raised this many places after the previous one, while requests are being answered. CPython
removes a tracer that raises, so a profiler sets the tracer again at the next call or return of a function.
"""

import dis
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType

import batch_manager
from batch_manager import forked_child
from batch_manager.responses.named_tensor import NamedTensor, OneTokenTensor, UniformArray
from batch_manager.worker import NESTED_WORKER_LOOPS

from .scenarios import SCENARIOS, Run

PACKAGE = os.path.dirname(batch_manager.__file__)
# Backends, including the scripted one, are not traced: they do not promise that an interrupted step can run again.
ELSEWHERE = (os.path.join(PACKAGE, "runtime"), os.path.join(PACKAGE, "testing", "scripted_backend.py"),
             os.path.join(PACKAGE, "testing", "scripted_tokens.py"))
# The files of the product that move items from the get callback to their final responses.
WHERE_ITEMS_MOVE = ("callbacks.py", "fetched_items.py", "guard.py", "unanswered.py")
MOST_IN_A_ROW = 6
SAMPLED_EVERY = 211
PLACES_BEFORE_IT_BEGINS = 1    # places before the worker enters its `try`


# Product code that the send callback of a run calls: an exception there belongs to the callback.
READ_IN_CALLBACKS = {NamedTensor.tensor.fget.__code__, NamedTensor.array.fget.__code__,
                     OneTokenTensor.array.fget.__code__, UniformArray.make.__code__}


class Injected(BaseException):
    """The asynchronous exception that the sweep raises."""


@cache
def _checks(code: CodeType) -> tuple[dict[int, int], set[int]]:
    """Return where CPython checks for an asynchronous exception in `code`, as offsets of instructions.

    Returns (offset of each call -> offset of the next instruction, offsets of jumps back).
    """
    steps = list(dis.get_instructions(code))
    return ({step.offset: behind.offset for step, behind in pairwise(steps)
             if step.opname in ("CALL", "CALL_FUNCTION_EX", "CALL_KW")},
            {step.offset for step in steps if "JUMP_BACKWARD" in step.opname and "NO_INTERRUPT" not in step.opname})


@cache
def _is_ours(path: str) -> bool:
    return path.startswith(PACKAGE) and not path.startswith(ELSEWHERE)


def _is_traced(frame: FrameType) -> bool:
    return _is_ours(frame.f_code.co_filename) and frame.f_code not in READ_IN_CALLBACKS


class Tracer:
    """Calls `at_place(number, frame)` at each place where CPython can raise an asynchronous exception.

    An exception of `at_place` is raised at that place.
    """

    def __init__(self, at_place: Callable[[int, FrameType], None]) -> None:
        self.number = 0
        self._at_place = at_place

    def __call__(self, frame: FrameType, event: str, _: object):
        if event != "call" or not _is_traced(frame):
            return None
        self._reach(frame)
        return self._in_frame(frame, -1)

    def put_back(self) -> None:
        """Set the tracer again, for new frames and for the frames that are running."""
        frame = sys._getframe(2)
        while frame is not None:
            if _is_traced(frame):
                frame.f_trace = self._in_frame(frame, frame.f_lasti)
            frame = frame.f_back
        sys.settrace(self)

    def _in_frame(self, frame: FrameType, before: int) -> Callable:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls, jumps = _checks(frame.f_code)

        def in_this_frame(frame: FrameType, event: str, _: object):
            nonlocal before
            if event == "opcode":
                # false if the call raised or the jump was not taken
                reached = calls.get(before) == frame.f_lasti or before in jumps and frame.f_lasti < before
                before = frame.f_lasti
                if reached:
                    self._reach(frame)
            return in_this_frame

        return in_this_frame

    def _reach(self, frame: FrameType) -> None:
        self.number += 1
        self._at_place(self.number, frame)


def traced(run: Run, tracer: Tracer) -> int:
    """Run a scenario to its end under a tracer. Returns the number of places that the run reached."""
    sys.settrace(tracer)
    try:
        run.start()
    except Injected:
        run.history.anomalies.append("C14: the exception left the worker")
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return tracer.number


def _verdict(run: Run) -> list[str]:
    """Return the violations of a run: each request must get one final response, and the counts must be right.

    The final response may say that the engine failed, or that the request could not be read. The code that reads a
    request cannot distinguish an exception of a user's object from an asynchronous exception.
    """
    return [fault for fault in run.faults() if fault[:3] in ("I1 ", "I2 ", "I3 ", "I4 ", "I6 ", "I28", "C14")
            and "is fair and was refused" not in fault]


def interrupted(name: str, place: int, gaps: Sequence[int] = ()) -> tuple[list[str], list[str]]:
    """Raise an exception at a place, and again after each gap. Returns (the places as text, violations)."""
    where: list[str] = []
    places_left = [place, *gaps]

    def strike(number: int, frame: FrameType) -> None:
        places_left[0] -= 1
        if places_left[0]:
            return
        where.append(_name(frame))
        del places_left[0]
        if places_left:
            sys.setprofile(put_back)
        raise Injected

    def put_back(frame: FrameType, event: str, _: object) -> None:
        sys.setprofile(None)
        tracer.put_back()

    run, tracer = Run(SCENARIOS[name]), Tracer(strike)
    traced(run, tracer)
    return where, _verdict(run)


def _name(frame: FrameType) -> str:
    return f"{os.path.relpath(frame.f_code.co_filename, PACKAGE)}:{frame.f_lineno} in {frame.f_code.co_name}"


def sweep(name: str, wanted: Callable[[int], bool] = lambda place: True, *, files: tuple[str, ...] = ("",),
          stops_at_first: bool = False) -> tuple[int, int, list[str]]:
    """Raise an exception at each wanted place of a scenario, in turn.

    Returns (number of places, number of places tried, violations).

    wanted           (number of a place) -> whether to try the place
    files            ends of the names of the files whose places are tried; "": all files
    stops_at_first   whether to try no more places after the first violation
    """
    tried, failures, original = 0, [], os.getpid()

    def fork(place: int, frame: FrameType) -> None:
        nonlocal tried
        if place <= PLACES_BEFORE_IT_BEGINS or (stops_at_first and failures) or not wanted(place):
            return
        if not frame.f_code.co_filename.endswith(files):
            return
        tried += 1
        child = os.fork()
        if child == 0:
            forked_child.current_process_id = original             # the engine then does not see that it is in a fork
            sys.unraisablehook = lambda _: None                    # raised in a generator that is being closed
            failures.clear()
            tried = -place
            raise Injected
        if os.waitpid(child, 0)[1]:
            failures.append(f"{name}: {_name(frame)}: python -m tests.sweep.interrupted '{name}' {place}")

    run = Run(SCENARIOS[name])
    places = traced(run, Tracer(fork))
    if tried < 0:
        os._exit(1 if _verdict(run) else 0)
    return places, tried, failures


def sweep_sample(name: str) -> tuple[int, int, list[str]]:
    """Sweep one in SAMPLED_EVERY places of a scenario."""
    return sweep(name, lambda place: place % SAMPLED_EVERY == len(name))


def sweep_where_items_move(name: str) -> tuple[int, int, list[str]]:
    """Sweep all places of a scenario in the files that move items between lists."""
    return sweep(name, files=WHERE_ITEMS_MOVE)


def sweep_rows(name: str, places: int, count: int, seed: int) -> tuple[int, list[str]]:
    """Run a scenario `count` times, and raise two to MOST_IN_A_ROW exceptions at random places in each run.

    Returns (number of exceptions raised, violations).

    places   number of places of the scenario
    """
    rng, struck, failures = random.Random(f"{name} {seed}"), 0, []
    for _ in range(count):
        place = rng.randint(PLACES_BEFORE_IT_BEGINS + NESTED_WORKER_LOOPS + 1, places)    # inside all its loops
        largest = rng.choice([1, 20, 300])
        gaps = [rng.randint(1, largest) for _ in range(rng.randint(1, MOST_IN_A_ROW - 1))]
        where, wrong = interrupted(name, place, gaps)
        struck += len(where)
        if wrong:
            failures.append(f"{name}: {', then '.join(where)}: {wrong[0]}: python -m tests.sweep.interrupted '{name}' "
                            f"{place} {' '.join(map(str, gaps))}")
    return struck, failures


def main() -> int:
    name, place, *gaps = sys.argv[1:]
    where, wrong = interrupted(name, int(place), [*map(int, gaps)])
    print(f"{', then '.join(where) or 'there is no such place'}\n" + ("\n".join(wrong) or "nothing is wrong"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
