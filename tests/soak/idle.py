"""C22: measures the CPU time of an idle manager and the delay until it reads a request.

    python -m tests.soak.idle

The program checks no bounds, because delays are long on a busy machine.
"""

import time
from random import Random
from statistics import median, quantiles
from threading import Event

from batch_manager import GptManager, InferenceRequest, Parts, SchedulerPolicy, TrtGptModelType
from batch_manager.testing.scripted_backend import ScriptedBackend

IDLE_S = 4.0
PICKUPS = 200


class Desk:
    """Callbacks of a manager. The get callback returns one request at a time and records how long it had waited."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, InferenceRequest]] = []
        self.waits: list[float] = []
        self.done = Event()

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        if not self.pending:
            return []
        since, request = self.pending.pop()
        self.waits.append(time.perf_counter() - since)
        return [request]

    def send(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        self.done.set()

    def wait_for_one(self, number: int, manager: GptManager | None) -> None:
        self.done.clear()
        self.pending.append((time.perf_counter(), InferenceRequest(number, {"input_ids": [1],
                                                                            "request_output_len": 1})))
        if manager is not None:
            manager.notify()
        self.done.wait(10)


def measure(idle_s: float = IDLE_S, pickups: int = PICKUPS) -> dict[str, str]:
    """Return {name of a measurement: result as text} for a manager with default settings.

    idle_s    seconds for which the CPU time of the idle worker is measured
    pickups   number of requests for each measured delay
    """
    desk, rng = Desk(), Random(0)
    with GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, desk.get,
                    desk.send, parts=Parts(backend=ScriptedBackend())) as manager:
        desk.wait_for_one(0, manager)
        clock = time.pthread_getcpuclockid(manager._worker.ident)
        began, before = time.monotonic(), time.clock_gettime(clock)
        time.sleep(idle_s)
        share = (time.clock_gettime(clock) - before) / (time.monotonic() - began)
        figures = {"idle worker": f"{share:.2%} of a core"}
        for name, to_notify in (("picked up by itself", None), ("picked up after notify", manager)):
            desk.waits.clear()
            for number in range(pickups):
                time.sleep(rng.uniform(0.001, 0.008))
                desk.wait_for_one(number, to_notify)
            milliseconds = [1e3 * wait for wait in desk.waits]
            figures[name] = (f"median {median(milliseconds):.2f} ms, ninth decile "
                             f"{quantiles(milliseconds, n=10)[8]:.2f}, longest {max(milliseconds):.2f}")
    return figures


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{name:>26}  {figure}")
