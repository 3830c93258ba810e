"""Measure what several ranks cost on the host: the control plane of an iteration, and ranks that wait.

    python -m tests.benchmarks.rank_control --batch 256 --iterations 300 --ranks 2 --idle-seconds 10

The model is scripted, and the other ranks do nothing in a step, so that the frames alone are measured. It prints one
line of JSON:

    alone_us        median and least microseconds of an iteration with one rank
    ranks_us        the same with several ranks, in the same process and in turns with one rank
    control_us      the differences
    frame_bytes     bytes of the last STEP frame
    idle_percent    of a core, that each idle rank used, rank 0 first; the callbacks of rank 0 are called as always
    idle_alone      the same for an engine of one rank
    pick_up_ms      median and longest time from handing a request over, without notify, until get was called
"""

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from batch_manager import GptManager, Parts, SchedulerPolicy, TrtGptModelOptionalParams, TrtGptModelType
from batch_manager.guard import Guard
from batch_manager.loop.follower import Follower
from batch_manager.parallel.control import join, lead
from batch_manager.parallel.leading import LeadingBackend
from batch_manager.parallel.wire import pack
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.host_bench import WARM_UP_ITERATIONS, Setting, Stopwatch, make_loop
from tests.harness.ranks import DrawingBackend
from tests.parallel.rank_program import FolderRendezvous, Rank

HOST = "127.0.0.1"
TIMEOUTS = {"host": HOST, "rank_timeout_s": 30.0, "connect_timeout_s": 60.0}


class NoBackend:
    """The backend of another rank, in which a step does nothing."""

    info = SimpleNamespace(is_asynchronous=False)

    def start(self, batch: Any) -> "NoBackend":
        return self

    def finish(self) -> None:
        return None

    def close(self) -> None:
        return None


def follow(folder: str, rank: int, num_ranks: int) -> None:
    link, wake = join(FolderRendezvous(Path(folder), 60.0), rank, num_ranks, **TIMEOUTS)
    with link.starting():
        link.exchange("ready")
    follower = Follower(link, NoBackend(), Guard(), wake=wake)
    while not follower.is_done(draining=False, aborting=False):
        follower.step(accept_new=True)
    follower.end(RuntimeError(), dict)


def control_cost(processes: Any, batch: int, iterations: int, num_ranks: int) -> dict[str, Any]:
    setting = Setting(batch=batch, iterations=iterations, streaming=False, policy="guaranteed_no_evict")
    with TemporaryDirectory() as folder:
        others = [processes.Process(target=follow, args=(folder, rank, num_ranks)) for rank in range(1, num_ranks)]
        for other in others:
            other.start()
        leader = lead(FolderRendezvous(Path(folder), 60.0), num_ranks, **TIMEOUTS)
        with leader.starting():
            leader.exchange("ready")
        loops = [make_loop(setting, Stopwatch())[0] for _ in range(2)]
        leading, frames = LeadingBackend(loops[1].backend, leader), []
        loops[1].backend = loops[1]._runner._backend = leading
        send_step = leader.send_step

        def noted(sent: Any, *more: Any) -> int:
            frames[:] = [sent]
            return send_step(sent, *more)
        leader.send_step = noted
        times: list[list[int]] = [[], []]
        for number in range(WARM_UP_ITERATIONS + iterations):
            for loop, kept in zip(loops, times, strict=True):
                began = time.perf_counter_ns()
                loop.step(accept_new=True)
                if number >= WARM_UP_ITERATIONS:
                    kept.append(time.perf_counter_ns() - began)
        frame = len(pack((0, frames[0], ())))
        leader.close()
        for other in others:
            other.join()
    (alone, least_alone), (ranks, least_ranks) = [(float(np.median(kept)) / 1e3, min(kept) / 1e3) for kept in times]
    return {"alone_us": [round(alone, 1), round(least_alone, 1)], "ranks_us": [round(ranks, 1), round(least_ranks, 1)],
            "control_us": [round(ranks - alone, 1), round(least_ranks - least_alone, 1)], "frame_bytes": frame}


class Server:
    """The least callbacks. The tests' own client, which checks each call, would cost as much as the engine."""

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.num_asked = 0

    def callbacks(self) -> dict[str, Any]:
        return {"get_inference_requests_cb": self.get, "send_response_cb": lambda *response: None,
                "poll_stop_signal_cb": tuple}

    def get(self, max_num_requests: int) -> list[Any]:
        self.num_asked += 1
        items, self.pending = self.pending, []
        return items


def idle_share(seconds: float) -> float:
    """Return the share of a core that this process uses, in percent."""
    time.sleep(1.0)
    before = time.process_time()
    time.sleep(seconds)
    return 100 * (time.process_time() - before) / seconds


def idle_alone(pipe: Any, seconds: float) -> None:
    backend = DrawingBackend(num_blocks=64, tokens_per_block=8, num_slots=8, max_seq_len=128)
    with GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                    **Server().callbacks(), parts=Parts(backend=lambda *given: backend),
                    optional_params=TrtGptModelOptionalParams(idle_poll_interval_s=0.0048)):
        pipe.send(idle_share(seconds))


def idle(pipe: Any, rank: int, num_ranks: int, folder: str, seconds: float) -> None:
    """One idle rank: send the share of a core that it used, then on rank 0 the longest time until a pick-up."""
    program, server, pick_ups = Rank(), Server(), []
    program.client = server
    assert program.construct(rank, num_ranks, folder, rank_timeout_s=60.0)["error"] == ""
    pipe.send(idle_share(seconds))
    if rank == 0:
        for number in range(20):
            time.sleep(0.013)
            handed, calls = time.perf_counter(), server.num_asked
            server.pending.append(number)                # no request: its refusal does not matter
            while server.num_asked == calls:
                time.sleep(0.0002)
            pick_ups.append(time.perf_counter() - handed)
        pipe.send([round(1e3 * float(np.median(pick_ups)), 2), round(1e3 * max(pick_ups), 2)])
    pipe.recv()
    program.manager.shutdown(drain=False)


def idle_cost(processes: Any, num_ranks: int, seconds: float) -> dict[str, Any]:
    mine, theirs = processes.Pipe()
    one = processes.Process(target=idle_alone, args=(theirs, seconds))
    one.start()
    alone = round(mine.recv(), 2)
    one.join()
    with TemporaryDirectory() as folder:
        pipes, others = [], []
        for rank in range(num_ranks):
            mine, theirs = processes.Pipe()
            others.append(processes.Process(target=idle, args=(theirs, rank, num_ranks, folder, seconds)))
            pipes.append(mine)
            others[-1].start()
        percent = [round(pipe.recv(), 2) for pipe in pipes]
        pick_up = pipes[0].recv()
        for pipe in pipes:
            pipe.send("end")
        for other in others:
            other.join()
    return {"idle_percent": percent, "idle_alone": alone, "pick_up_ms": pick_up}


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser("python -m tests.benchmarks.rank_control", description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--idle-ranks", type=int, default=4)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    options = parser.parse_args(argv)
    processes = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps({**control_cost(processes, options.batch, options.iterations, options.ranks),
                      **idle_cost(processes, options.idle_ranks, options.idle_seconds)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
