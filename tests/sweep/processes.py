"""Ends processes that have an engine, and checks that each request is answered before the process ends.

    python -m tests.sweep.processes SCENARIO|all [REPEATS] [FIRST] [-v]      -v: shows the stderr of the processes

Each repeat is a forked process, whose parent has imported the engine and has no threads. The process ends like any
interpreter. It prints the ids of the requests that get returned, and the ids of final responses. A repeat passes if
each request got one final response, the exit status is the expected one, and the process ended within SECONDS. If the
machine has more load than cores, the limit is LONGEST.
"""

import contextlib
import ctypes
import gc
import io
import logging
import os
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat

from batch_manager import build, gpt_manager
from batch_manager.config import Parts, TrtGptModelOptionalParams
from batch_manager.errors import DeviceLostError, ManagerClosedError
from batch_manager.gpt_manager import GptManager
from batch_manager.names import SchedulerPolicy, TrtGptModelType
from batch_manager.requests.inference_request import InferenceRequest
from batch_manager.testing.scripted_backend import ScriptedBackend

SECONDS, LONGEST = 5.0, 40.0
SECONDS_OF = {"a_hundred_thousand_requests_in_one_get": 20.0}    # takes two seconds of CPU
STEP_S = 0.001
LONG = 900                                   # tokens of an output that no scenario finishes


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def request(request_id: int, new_tokens: int = LONG) -> InferenceRequest:
    return InferenceRequest(request_id, {"input_ids": [request_id % 900 + 1], "request_output_len": new_tokens})


class Server:
    """Callbacks that print the ids of requests and of final responses. `on_send` is called after each final response.

    The class is not a `Client` of tests/harness: the process can end at any time, so it prints each event at once.
    """

    def __init__(self, pending: list, on_send: Callable[[int], None] = lambda request_id: None) -> None:
        self.pending, self.on_send = pending, on_send
        self.num_finals = 0

    def get(self, max_num_requests: int) -> list:
        items, self.pending = self.pending, []
        if items:
            say("\n".join(f"handed {item.request_id}" for item in items))
        return items

    def send(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        self.num_finals += 1
        say(f"final {request_id} {error.partition(']')[0][1:] or 'done'}")
        self.on_send(request_id)


def make(get: Callable, send: Callable, on_step: Callable | None = None, **options) -> GptManager:
    return GptManager(
        None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get, send,
        optional_params=TrtGptModelOptionalParams(max_batch_size=8, **options),
        parts=Parts(backend=ScriptedBackend(on_step=on_step or (lambda batch: time.sleep(STEP_S)), verify=False)))


def started(on_send: Callable[[int], None] = lambda request_id: None, new_tokens: int = LONG) -> GptManager:
    """Return a manager whose three requests are active, or of which one has already ended."""
    server = Server([request(i, new_tokens) for i in range(3)], on_send)
    manager = make(server.get, server.send)
    while manager.num_active_requests < 3 and not server.num_finals:
        time.sleep(0.0005)
    return manager


KEPT = []                                    # keeps managers until the interpreter ends


# ---------------------------------------------------------------------- how a process ends


def the_script_ends(seed: int) -> None:
    KEPT.append(started())


def an_uncaught_exception(seed: int) -> None:
    KEPT.append(started())
    raise ValueError("in the main thread")


def an_exception_leaves_the_with_block(seed: int) -> None:
    with started():
        raise ValueError("in the main thread")


def sys_exit(seed: int) -> None:
    KEPT.append(started())
    sys.exit(7)


def a_keyboard_interrupt(seed: int) -> None:
    KEPT.append(started())
    threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    time.sleep(20)


def a_keyboard_interrupt_while_draining(seed: int) -> None:
    manager = started()
    threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    manager.shutdown()


def deleted_without_shutdown(seed: int) -> None:
    manager = started()
    worker = manager._worker
    del manager
    gc.collect()
    worker.join(SECONDS)
    say(f"alive {worker.is_alive()}")


def a_callback_blocks(seed: int) -> None:
    """A shutdown while a callback blocks returns False after its timeout. A second one succeeds after the callback."""
    gpt_manager.SECONDS_TO_STOP_AFTER_A_TIMEOUT = 0.01
    inside, go_on = threading.Event(), threading.Event()
    manager = started(lambda request_id: (inside.set(), go_on.wait(20)), new_tokens=2)
    inside.wait(20)
    assert manager.shutdown(drain=False, timeout=0.01) is False
    assert manager.health()["activity"] == "send"
    go_on.set()
    assert manager.shutdown()


def exit_while_a_callback_blocks(seed: int) -> None:
    inside = threading.Event()
    KEPT.append(started(lambda request_id: (inside.set(), time.sleep(0.05)), new_tokens=2))
    inside.wait(20)


def sys_exit_inside_a_callback(seed: int) -> None:
    with started(lambda request_id: sys.exit(9), new_tokens=3) as manager:
        time.sleep(0.01)
    assert manager.health()["callback_failures"]["send"] == 3


def shutdown_from_a_callback(seed: int) -> None:
    ready, managers, answers = threading.Event(), [], []

    def ask(request_id: int) -> None:
        ready.wait(20)
        answers.append(managers[0].shutdown(drain=False))

    managers.append(started(ask, new_tokens=3))
    ready.set()
    assert managers[0].wait_until_terminate(20)
    assert not any(answers)


def forked(seed: int) -> None:
    manager = started()
    child = os.fork()
    if child == 0:
        for call in (manager.notify, manager.shutdown, manager.health, manager.wait_until_terminate):
            with contextlib.suppress(ManagerClosedError):
                call()
                os._exit(1)
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    assert manager.shutdown(drain=False)


def a_hundred_thousand_requests_in_one_get(seed: int) -> None:
    distinct = [request(i, 1) for i in range(1_000)]
    server = Server(distinct * 100)                                # ids that are active, waiting or free again
    with make(server.get, server.send):
        while server.pending:
            time.sleep(0.001)


def two_managers_of_which_one_fails(seed: int) -> None:
    def lose(batch) -> None:
        raise DeviceLostError("planted")

    good, bad = Server([request(i, 20) for i in range(3)]), Server([request(10 + i, 20) for i in range(3)])
    with make(good.get, good.send) as healthy, make(bad.get, bad.send, lose) as failed:
        while good.num_finals + bad.num_finals < 6:
            time.sleep(0.0005)
        assert failed.health()["state"] == "FAILED" and healthy.health()["state"] == "RUNNING"
        assert not healthy.health()["errors"]


def system_exit_injected(seed: int) -> None:
    interrupt_the_worker(random.Random(seed), 1)


def many_exceptions_injected(seed: int) -> None:
    interrupt_the_worker(random.Random(seed), 40)


def interrupt_the_worker(rng: random.Random, times: int) -> None:
    """Raise asynchronous exceptions in the worker at random times.

    The callbacks are C functions, in which no exception can strike. The requests and final responses are therefore
    known exactly.

    Logging is disabled, and exceptions come only between the worker's first iteration and its end. In `logging`, and in
    the code of `threading` that starts and ends threads, an exception between the acquisition of a lock and the
    following `try` leaves the lock locked for ever. Users of these modules cannot prevent this.
    """
    logging.disable()
    for name in list(logging.root.manager.loggerDict):             # the first call takes a lock of logging
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            logging.getLogger(name).isEnabledFor(level)
    build.numpy_to_tensor = None                                   # print reads the tensors; avoids importing torch
    sys.setswitchinterval(1e-5)
    batches = [[request(10 * turn + i, rng.randint(1, 8)) for i in range(rng.randint(1, 6))] for turn in range(12)]
    told = io.StringIO()                                           # print writes an id first, then the rest
    manager = make(partial(next, chain(batches, repeat(()))), partial(print, "\n", sep="\x1f", end="", file=told),
                   lambda batch: None, idle_poll_interval_s=0.0005)
    inject, stopped = ctypes.pythonapi.PyThreadState_SetAsyncExc, manager._control.stopped
    worker = ctypes.c_ulong(manager._worker.ident)
    ending = rng.randint(0, times)
    while not manager._loop.iteration:
        time.sleep(0.0001)
    for number in range(times):
        if number == ending:
            threading.Thread(target=manager.shutdown, args=(rng.random() < 0.5,)).start()
        time.sleep(rng.choice([0, 0.0002, 0.002]))
        kind = ctypes.py_object(rng.choice([SystemExit, KeyboardInterrupt, ValueError]))
        if not stopped.is_set:    # no thread switch before the call: this thread keeps the GIL
            inject(worker, kind)
    assert manager.shutdown(timeout=4)
    items = manager._loop.unanswered
    handed = [item.request_id for batch in batches for item in batch][:items.num_accepted + items.num_refused]
    say("\n".join(f"handed {request_id}" for request_id in handed))
    say("\n".join(f"final {record.split(chr(31))[1]}" for record in told.getvalue().split("\n") if chr(31) in record))


# scenario -> expected exit status
SCENARIOS: dict[Callable[[int], None], int] = {
    the_script_ends: 0,
    an_uncaught_exception: 1,
    an_exception_leaves_the_with_block: 1,
    sys_exit: 7,
    a_keyboard_interrupt: -signal.SIGINT,
    a_keyboard_interrupt_while_draining: -signal.SIGINT,
    deleted_without_shutdown: 0,
    a_callback_blocks: 0,
    exit_while_a_callback_blocks: 0,
    sys_exit_inside_a_callback: 0,
    shutdown_from_a_callback: 0,
    forked: 0,
    a_hundred_thousand_requests_in_one_get: 0,
    two_managers_of_which_one_fails: 0,
    system_exit_injected: 0,
    many_exceptions_injected: 0,
}
BY_NAME = {scenario.__name__: scenario for scenario in SCENARIOS}


# ---------------------------------------------------------------------- judging


def _read(pipe: int, deadline: float) -> Iterator[bytes]:
    """Yield the data of a pipe until its other end is closed or the deadline has passed."""
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        yield data


def _wait(child: int, deadline: float) -> int | None:
    """Return the exit status. After the deadline, kill the child and return None."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def judge(said: str, status: int | None, expected: int, seconds: float, limit: float = SECONDS) -> str:
    """Return a description of what is wrong with the output of a process, or an empty string."""
    words = [line.split() for line in said.splitlines() if line]
    handed = Counter(line[1] for line in words if line[0] == "handed")
    finals = Counter(line[1] for line in words if line[0] == "final")
    if status is None:
        return f"still running after {seconds:.1f} s"
    if status != expected:
        return f"exit status {status}, not {expected}"
    if finals != handed:
        return f"{(handed - finals).total()} were not answered, {(finals - handed).total()} more than was handed over"
    if seconds > limit and os.getloadavg()[0] <= os.cpu_count():
        return f"it took {seconds:.1f} s"
    if ["alive", "True"] in words:
        return "the worker outlives its manager"
    return ""


def repeat_one(name: str, seed: int, is_loud: bool) -> tuple[str, float] | None:
    """Run a scenario in a forked process. Returns (what is wrong, seconds) in the parent, and None in the child.

    The child's caller must end the process.
    """
    pipe, end = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(pipe)
        os.dup2(end, 1)
        os.close(end)
        if not is_loud:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        BY_NAME[name](seed)
        return None
    os.close(end)
    said = b"".join(_read(pipe, began + LONGEST)).decode()
    status = _wait(child, began + LONGEST)
    os.close(pipe)
    seconds = time.monotonic() - began
    return judge(said, status, SCENARIOS[BY_NAME[name]], seconds, SECONDS_OF.get(name, SECONDS)), seconds


def main() -> int:
    """Run the repeats of the command line. Print a line for each failed repeat, and one for each scenario."""
    name, *numbers = [argument for argument in sys.argv[1:] if argument != "-v"]
    repeats, first = (*map(int, numbers), *(1, 0)[len(numbers):])
    all_wrong = 0
    for name in list(BY_NAME) if name == "all" else [name]:    # noqa: B020
        wrong, longest = 0, 0.0
        for seed in range(first, first + repeats):
            outcome = repeat_one(name, seed, "-v" in sys.argv)
            if outcome is None:
                return 0
            longest = max(longest, outcome[1])
            if outcome[0]:
                wrong += 1
                print(f"{name}: {outcome[0]}: python -m tests.sweep.processes {name} 1 {seed}", flush=True)
        print(f"{name}: {repeats} repeats, {wrong} wrong, the longest took {longest:.2f} s", flush=True)
        all_wrong += wrong
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
