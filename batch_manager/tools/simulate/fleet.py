"""Simulate replicas that share one stream of requests, event by event in virtual time."""

import gc
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...stats.trace import IterationTrace
from ..interrupts import interrupts_between_steps
from .cost_model import CostModel
from .engine_settings import EngineSettings
from .log_book import LogBook
from .replica import Replica
from .routing import ROUTING
from .traffic import Traffic

STEPS_BETWEEN_COLLECTIONS = 20_000
REQUESTS_BETWEEN_LOOKS = 100


@dataclass(frozen=True, slots=True)
class Run:
    """A completed simulation.

    wall_s      virtual seconds from the beginning to the last final response
    arrival_s   [n] arrival of each request in virtual seconds. In a closed loop, these times differ from the
                arrival times in `traffic`
    """

    traffic: Traffic
    log_book: LogBook
    replicas: tuple[Replica, ...]
    wall_s: float
    arrival_s: "list[float]"


def simulate(traffic: Traffic, settings: EngineSettings, cost: CostModel, *, num_replicas: int = 1,
             routing: str = "round-robin", concurrency: int | None = None, seed: int = 0,
             trace: Callable[[IterationTrace], None] | None = None, leaps: bool = True,
             watch: Callable[[int, float], None] | None = None) -> Run:
    """Serve the traffic until its last final response.

    routing       name of a routing rule, a key of ROUTING
    concurrency   number of requests in progress in a closed loop, in which the next request arrives when one is done;
                  None: requests arrive at the times of the traffic
    seed          seed of the random variation of step times
    trace         called with the IterationTrace of each iteration of the first replica; None: no trace
    leaps         whether to compute many uneventful iterations at once, which is faster and gives the same figures
    watch         called with (requests done, virtual seconds) each time that another 100 requests are done

    Raises ConfigError for settings that a manager would refuse.
    """
    log_book = LogBook(len(traffic))
    arrival_s = traffic.arrival_s.tolist()
    arriving = deque(range(len(traffic)))
    due: list[tuple[float, int]] = []            # in a closed loop: (time, index)
    ended_at, num_done = 0.0, 0

    def on_final(index: int, now: float) -> None:
        nonlocal ended_at, num_done
        ended_at, num_done = max(ended_at, now), num_done + 1
        if watch is not None and num_done % REQUESTS_BETWEEN_LOOKS == 0:
            watch(num_done, now)
        if concurrency is not None and arriving:
            heapq.heappush(due, (now, arriving.popleft()))

    replicas = tuple(Replica(number, settings, cost, traffic, log_book, seed=seed, on_final=on_final, leaps=leaps,
                             trace=trace if number == 0 else None) for number in range(num_replicas))
    router = ROUTING[routing](replicas, traffic)
    if concurrency is not None:
        due = [(0.0, arriving.popleft()) for _ in range(min(concurrency, len(arriving)))]
    # (when its next step is due, whether it has active requests, number) of each replica with unfinished requests.
    # Entries whose time differs from the replica's are stale. At equal times, replicas without active requests go
    # first: if they refuse all, no time passes, and in a closed loop the next request arrives before others step.
    busy: list[tuple[float, bool, int]] = []
    with interrupts_between_steps() as check_interrupt, _few_collections() as collect:
        while True:
            check_interrupt()
            if concurrency is None:
                next_s = arrival_s[arriving[0]] if arriving else None
            else:
                next_s = due[0][0] if due else None
            if busy and (next_s is None or busy[0][0] < next_s):
                at, _, number = busy[0]
                replica = replicas[number]
                if not replica.unfinished or replica.next_s != at:
                    heapq.heappop(busy)
                    continue
                replica.step()
                collect()
                if replica.unfinished:
                    heapq.heapreplace(busy, (replica.next_s, replica.is_running, number))
                else:
                    heapq.heappop(busy)
            elif next_s is not None:
                index = arriving.popleft() if concurrency is None else heapq.heappop(due)[1]
                arrival_s[index] = next_s
                replica = replicas[router.choose(index)]
                before = replica.next_s if replica.unfinished else None
                replica.hand_over(index, next_s)
                if replica.next_s != before:
                    heapq.heappush(busy, (replica.next_s, replica.is_running, replica.number))
            else:
                return Run(traffic, log_book, replicas, ended_at, arrival_s)


@contextmanager
def _few_collections() -> Iterator[Callable[[], None]]:
    """Turn automatic garbage collection off within the context.

    Yields a function to call after each step. Every STEPS_BETWEEN_COLLECTIONS-th call of this function collects
    the youngest generation of objects.

    Automatic collection scans all live requests again and again. This takes a fifth of the simulation's time.
    """
    was_enabled, steps = gc.isenabled(), 0

    def collect() -> None:
        nonlocal steps
        steps += 1
        if steps % STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect(0)

    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
