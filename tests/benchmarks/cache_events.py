"""Measure what events of the prefix cache cost the worker, in each iteration.

    python -m tests.benchmarks.cache_events --batch 256 --iterations 2000

Three loops with the same requests and a scripted model run in turns: two without events, and one with a hook, which
drops its events or publishes them (extras/kv_events.py). It prints one line of JSON for each hook:

    iteration_us   median processor time of the worker's thread for an iteration without events; the scripted model
                   computes nothing
    noise_us       median difference of the two loops without events, iteration by iteration
    events_us      median difference with events
    percent        events_us of iteration_us
    events         events in an iteration
    reader_us      processor time of all other threads in an iteration: those of the publisher
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from time import process_time_ns, thread_time_ns

import numpy as np

from batch_manager import KvEvent
from batch_manager.extras.kv_events import KvEventPublisher
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.host_bench import WARM_UP_ITERATIONS, Setting, Stopwatch, make_loop
from batch_manager.tools.workload import at_least


def measure(setting: Setting, hook: Callable[[Sequence[KvEvent]], None]) -> dict[str, object]:
    order = np.random.default_rng(0)
    loops = [make_loop(setting, Stopwatch(), reuses=True, hook=each)[0] for each in (None, None, hook)]
    rows = np.zeros((WARM_UP_ITERATIONS + setting.iterations, len(loops)))
    others_began = process_time_ns() - thread_time_ns()
    for row in rows:
        for which in order.permutation(len(loops)):
            began = thread_time_ns()
            loops[which].step(accept_new=True)
            row[which] = (thread_time_ns() - began) / 1e3
    others_us = (process_time_ns() - thread_time_ns() - others_began) / 1e3
    for loop in loops:
        loop.backend.close()
    times = rows[WARM_UP_ITERATIONS:]
    iteration = float(np.median(times[:, 0]))
    noise, events = (float(np.median(times[:, which] - times[:, 0])) for which in (1, 2))
    log = loops[2].kv_events
    assert log is not None
    return {"iteration_us": round(iteration, 1), "noise_us": round(noise, 1), "events_us": round(events, 1),
            "percent": round(100 * events / iteration, 2), "events": round(log.num_events / len(rows), 1),
            "reader_us": round(others_us / len(rows), 1)}


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=at_least(1), default=256, help="(256)")
    parser.add_argument("--iterations", type=at_least(1), default=2000, help="(2000)")
    parser.add_argument("--output-tokens", type=at_least(1), default=64, help="(64)")
    parser.add_argument("--tokens-per-block", type=int, default=64, help="(64)")
    options = parser.parse_args(arguments)
    setting = Setting(batch=options.batch, iterations=options.iterations, streaming=True, policy="guaranteed_no_evict",
                      tokens_per_block=options.tokens_per_block, output_len=options.output_tokens)
    with closing(KvEventPublisher("inproc://measured")) as publisher:
        for name, hook in (("dropped", lambda events: None), ("published", publisher)):
            print(json.dumps({"events are": name, **measure(setting, hook), "options": vars(options),
                              "python": platform.python_version()}))


if __name__ == "__main__":
    main()
