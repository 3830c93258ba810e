"""G4: idle time of the GPU between decode steps. G8: gain from running ahead, and from two micro-batches."""

import threading
from collections.abc import Iterator
from typing import Any

from ...errors import ConfigError
from ..bench.errors import BenchmarkError
from .bench import Bench
from .device_clock import DeviceActivity
from .engines import GRAPHS, STEP_TOKENS, Engine, Served, Stamp, engine, equal_requests, not_reached, refusal_of_graphs
from .records import Record
from .shapes import LLAMA_135M

BATCH, CONTEXT, STEPS, WATCHED_STEPS = 256, 512, 200, 100
GOOD_IDLE_US = 20.0
KV_TOKENS = BATCH * (CONTEXT + 2 * STEPS)


def run(bench: Bench) -> Iterator[Record]:
    for label, graphs in GRAPHS:
        try:
            if bench.wants("G4"):
                bench.require(10)
                yield from _idle(bench, label, graphs)
            if bench.wants("G8"):
                bench.require(20)
                yield from _ablation(bench, label, graphs)
        except ConfigError as error:
            if (reason := refusal_of_graphs(error, graphs)) is None:
                raise
            for goal in ("G4", "G4-share", "G8", "G8-overlap"):
                if bench.wants(goal.partition("-")[0]):
                    yield not_reached(goal, label, reason)


def _idle(bench: Bench, label: str, graphs: bool) -> Iterator[Record]:
    """Yield records of the idle time: the time of an untraced step minus the busy time of a traced step."""
    batch, context, steps, watched = bench.pick((BATCH, CONTEXT, STEPS, WATCHED_STEPS), (2, 4, 1, 1))
    with engine(bench, LLAMA_135M, max_batch=BATCH, kv_tokens=KV_TOKENS, cuda_graphs=graphs) as made:
        times = [made.generate(batch, context, steps).step_seconds(batch) for _ in range(bench.pick(2, 1))]
        activity = _watch(bench, made, batch, context, watched)
    step, busy = min(times), activity.busy_seconds / watched
    idle, case = max(step - busy, 0.0), f"{label}, {BATCH} of {CONTEXT} tokens"
    spread = max(times) / min(times) - 1
    yield Record("G4", case, idle * 1e6, GOOD_IDLE_US, "us", spread, figures=f"a step takes {step * 1e3:.3f} ms")
    yield Record("G4-share", case, idle * 1e3, step * 1e3, "ms", spread)
    yield Record("fact", f"{label}: kernels of a decode step", activity.launches / watched)
    yield Record("fact", f"{label}: copies to the device in a decode step", activity.uploads / watched)


def _watch(bench: Bench, made: Engine, batch: int, context: int, steps: int) -> DeviceActivity:
    """Return the activity of the device during `steps` iterations in which the whole batch generates.

    The worker waits while the tracer starts and ends.

    Raises BenchmarkError if the engine does not reach these iterations.
    """
    client, seen = made.client, 0

    def all_generate(stamp: Stamp) -> bool:
        return stamp.generating == batch and not stamp.contexts

    def enough(stamp: Stamp) -> bool:
        nonlocal seen
        seen += 1
        return seen >= steps

    client.hold_when(all_generate)
    output = 2 * -(-batch * context // STEP_TOKENS) + steps + bench.pick(16, 2)
    requests = equal_requests(made.shape, batch, context, output)
    failures: list[BenchmarkError] = []

    def serve() -> None:
        try:
            made.serve(requests)
        except BenchmarkError as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="gpu_report serves")
    thread.start()
    try:
        client.wait_until_held()
        bench.clock.synchronize()
        with bench.clock.watch() as found:
            client.let_go_until(enough)
            client.wait_until_held()
    finally:
        client.let_go()
        thread.join()
    if failures:
        raise failures[0]
    return found[0]


def _ablation(bench: Bench, label: str, graphs: bool) -> Iterator[Record]:
    """Yield records that compare the tokens/s of run-ahead, and of two micro-batches, with lockstep."""
    modes: dict[str, dict[str, Any]] = {
        "lockstep": {"run_ahead": False, "max_batch": BATCH}, "run ahead": {"run_ahead": True, "max_batch": BATCH},
        "overlap": {"enable_trt_overlap": True, "max_batch": BATCH // 2}}
    batch, context, steps = bench.pick((BATCH, CONTEXT, STEPS), (2, 4, 3))
    rates, spread = {}, {}
    for mode, options in modes.items():
        with engine(bench, LLAMA_135M, kv_tokens=KV_TOKENS, cuda_graphs=graphs, **options) as made:
            runs: list[Served] = [made.generate(batch, context, steps) for _ in range(bench.pick(2, 1))]
        found = [one.generation_rate() for one in runs]
        rates[mode], spread[mode] = max(found), max(found) / min(found) - 1
    for goal, mode in (("G8", "run ahead"), ("G8-overlap", "overlap")):
        yield Record(goal, f"{label}, {BATCH} of {CONTEXT} tokens", rates[mode], rates["lockstep"], "tokens/s",
                     max(spread[mode], spread["lockstep"]))

