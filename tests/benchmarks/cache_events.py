"""Measure what events of the prefix cache cost the worker, in each iteration.

    python -m tests.benchmarks.cache_events --batch 256 --iterations 2000

Three loops with the same requests and a scripted model run in turns: two without events, and one with a hook, which
drops its events or hands them to another thread, as the publisher does. It prints one line of JSON for each hook:

    iteration_us   median processor time of the worker's thread for an iteration without events; the scripted model
                   computes nothing
    noise_us       median difference of the two loops without events, iteration by iteration
    events_us      median difference with events
    percent        events_us of iteration_us
    events         events in an iteration, and their blocks
    reader_us      processor time of the other thread for the events of an iteration: names, objects, `to_vllm`
"""

import argparse
import json
import platform
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import thread_time_ns

import numpy as np

from batch_manager import KvEvent
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.host_bench import WARM_UP_ITERATIONS, Setting, Stopwatch, make_loop
from batch_manager.tools.workload import at_least


class Dropping:
    """A hook that counts events."""

    def __init__(self) -> None:
        self.num_events = self.num_blocks = self.spent_ns = 0

    def __call__(self, events: Sequence[KvEvent]) -> None:
        self.num_events += len(events)

    def close(self) -> None:
        pass


class Handing(Dropping):
    """A hook that hands events to a thread, which reads them."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: SimpleQueue[Sequence[KvEvent] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read_all)
        self._thread.start()

    def __call__(self, events: Sequence[KvEvent]) -> None:
        self._queue.put(events)

    def _read_all(self) -> None:
        while (events := self._queue.get()) is not None:
            for event in events:
                event.to_vllm()
                self.num_events += 1
                self.num_blocks += len(event.blocks)
        self.spent_ns = thread_time_ns()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def measure(setting: Setting, hook: Dropping) -> dict[str, object]:
    order = np.random.default_rng(0)
    loops = [make_loop(setting, Stopwatch(), reuses=True, hook=each)[0] for each in (None, None, hook)]
    rows = np.zeros((WARM_UP_ITERATIONS + setting.iterations, len(loops)))
    for row in rows:
        for which in order.permutation(len(loops)):
            began = thread_time_ns()
            loops[which].step(accept_new=True)
            row[which] = (thread_time_ns() - began) / 1e3
    for loop in loops:
        loop.backend.close()
    hook.close()
    times = rows[WARM_UP_ITERATIONS:]
    iteration = float(np.median(times[:, 0]))
    noise, events = (float(np.median(times[:, which] - times[:, 0])) for which in (1, 2))
    return {"hook": type(hook).__name__, "iteration_us": round(iteration, 1), "noise_us": round(noise, 1),
            "events_us": round(events, 1), "percent": round(100 * events / iteration, 2),
            "events": [round(count / len(rows), 1) for count in (hook.num_events, hook.num_blocks)],
            "reader_us": round(hook.spent_ns / 1e3 / len(rows), 1)}


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=at_least(1), default=256, help="(256)")
    parser.add_argument("--iterations", type=at_least(1), default=2000, help="(2000)")
    parser.add_argument("--output-tokens", type=at_least(1), default=64, help="(64)")
    parser.add_argument("--tokens-per-block", type=int, default=64, help="(64)")
    options = parser.parse_args(arguments)
    setting = Setting(batch=options.batch, iterations=options.iterations, streaming=True, policy="guaranteed_no_evict",
                      tokens_per_block=options.tokens_per_block, output_len=options.output_tokens)
    for hook in (Dropping(), Handing()):
        print(json.dumps({**measure(setting, hook), "options": vars(options), "python": platform.python_version()}))


if __name__ == "__main__":
    main()
