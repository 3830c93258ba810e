"""Time, sleep and the control block of the worker, without a thread and without waiting."""

from collections.abc import Callable

from batch_manager import interpreter_exit
from batch_manager.clock import reliable
from batch_manager.worker import WorkerControl

STEP_S = 0.02


class VirtualClock:
    """Moves when a step runs, when the worker sleeps and when a fault says so.

    Every reading is a point at which another thread could have done something: `at_reading` counts down to it.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.readings_left = -1
        self.at_reading: Callable[[], None] | None = None

    def monotonic(self) -> float:
        if self.readings_left >= 0:
            self.readings_left -= 1
            if self.readings_left < 0:
                self.at_reading()
        return self.now

    def timestamp(self) -> str:
        return "01-02-2026 03:04:05"

    def interrupt(self, readings: int, what: Callable[[], None]) -> None:
        """Do something after so many more readings."""
        self.readings_left, self.at_reading = readings, what


class VirtualWake:
    """Sleeping takes no time but the clock's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def set(self) -> None:
        pass

    def wait_and_clear(self, seconds: float) -> None:
        self._clock.now += seconds


def virtual_control(clock: VirtualClock) -> WorkerControl:
    """The real control block; only its sleep is virtual."""
    control = WorkerControl(reliable(clock), 0.0)
    control.wake = VirtualWake(clock)
    return control


def exit_of_the_interpreter(control: WorkerControl) -> None:
    """What `threading` would call, for this worker and no other of the process."""
    others, interpreter_exit._controls = interpreter_exit._controls, {control: None}
    try:
        interpreter_exit._abort_all_workers()
    finally:
        interpreter_exit._controls, interpreter_exit._is_exiting = others, False
