"""Simulate replicas that share one stream of requests, event by event in virtual time."""

import gc
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ...stats.trace import IterationTrace
from ..bench.client import NOT_SENT
from ..interrupts import interrupts_between_steps
from .cost_model import CostModel
from .engine_settings import EngineSettings
from .log_book import LogBook
from .replica import Replica
from .routing import ROUTING
from .traffic import Traffic

STEPS_BETWEEN_COLLECTIONS = 20_000
REQUESTS_BETWEEN_LOOKS = 100
DONE = -1


@dataclass(frozen=True, slots=True)
class Run:
    """A completed simulation.

    wall_s      virtual seconds from the beginning to the last final response
    arrival_s   [n] arrival of each request in virtual seconds. In a closed loop, and for later turns of sessions,
                these times differ from the arrival times in `traffic`
    """

    traffic: Traffic
    log_book: LogBook
    replicas: tuple[Replica, ...]
    wall_s: float
    arrival_s: "list[float]"


def simulate(traffic: Traffic, settings: EngineSettings, cost: CostModel, *, num_replicas: int = 1,
             routing: str = "round-robin", concurrency: int | None = None, at_most: int | None = None, seed: int = 0,
             trace: Callable[[IterationTrace], None] | None = None, leaps: bool = True,
             watch: Callable[[int, float], None] | None = None) -> Run:
    """Serve the traffic until its last final response.

    routing       name of a routing rule, a key of ROUTING
    concurrency   number of requests or sessions in progress in a closed loop, in which the next one arrives when one is
                  done; None: they arrive at the times of the traffic
    at_most       requests on all replicas at a time: an arrived request waits, and is routed when fewer are; None: any
    seed          seed of the random variation of step times
    trace         called with the IterationTrace of each iteration of the first replica; None: no trace
    leaps         whether to compute many uneventful iterations at once, which is faster and gives the same figures
    watch         called with (requests done, virtual seconds) each time that another 100 requests are done

    After a failed turn, the later turns of its session fail with NOT_SENT. Raises ConfigError for settings that a
    manager would refuse.
    """
    log_book = LogBook(len(traffic))
    arrival_s = traffic.arrival_s.tolist()
    turns = traffic.turns
    following = {} if turns is None else turns.following
    arriving = deque(range(len(traffic)) if turns is None else np.flatnonzero(turns.number == 1).tolist())
    due: list[tuple[float, int]] = []            # (time, index of a request that arrives; DONE: a request is done)
    held: deque[int] = deque()                   # requests that arrived and wait until fewer than `at_most` are inside
    ended_at, num_done, num_inside = 0.0, 0, 0

    def on_final(index: int, now: float) -> None:
        nonlocal ended_at, num_done
        ended_at, num_done = max(ended_at, now), num_done + 1
        if watch is not None and num_done % REQUESTS_BETWEEN_LOOKS == 0:
            watch(num_done, now)
        if at_most is not None:
            heapq.heappush(due, (now, DONE))
        after = following.get(index)
        if after is not None and index not in log_book.errors:
            heapq.heappush(due, (now + float(turns.think_s[after]), after))
            return
        while after is not None:
            log_book.errors[after], arrival_s[after] = NOT_SENT, now
            after, num_done = following.get(after), num_done + 1
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
            is_due = bool(due) and (concurrency is not None or not arriving or due[0][0] <= arrival_s[arriving[0]])
            if is_due:
                next_s = due[0][0]
            else:
                next_s = arrival_s[arriving[0]] if arriving and concurrency is None else None
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
                index = heapq.heappop(due)[1] if is_due else arriving.popleft()
                if index == DONE:
                    num_inside -= 1
                else:
                    arrival_s[index] = next_s
                if at_most is not None:
                    if index != DONE:
                        held.append(index)
                    if not held or num_inside >= at_most:
                        continue
                    index, num_inside = held.popleft(), num_inside + 1
                replica = replicas[router.choose(index)]
                before = replica.next_s if replica.unfinished else None
                replica.hand_over(index, next_s, arrival_s[index])
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
