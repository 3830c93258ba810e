"""Control blocks of the worker for tests without a thread and without real waiting."""

from batch_manager import interpreter_exit
from batch_manager.clock import reliable
from batch_manager.worker import WorkerControl

from .clock import VirtualClock


class VirtualWake:
    """A worker's wake event for tests: a wait advances the virtual clock and returns at once."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def set(self) -> None:
        pass

    def wait_and_clear(self, seconds: float) -> None:
        self._clock.now += seconds


def virtual_control(clock: VirtualClock) -> WorkerControl:
    """Return a WorkerControl whose waits advance the clock and return at once."""
    control = WorkerControl(reliable(clock), 0.0)
    control.wake = VirtualWake(clock)
    return control


def exit_of_the_interpreter(control: WorkerControl) -> None:
    """Run the package's handler of the interpreter's exit, which `threading` calls, for this worker only."""
    others, interpreter_exit._controls = interpreter_exit._controls, {control: None}
    try:
        interpreter_exit._abort_all_workers()
    finally:
        interpreter_exit._controls, interpreter_exit._is_exiting = others, False
