"""T16: the cost of the production checks in an iteration of eight requests.

Each check is removed in turn, in one process. Portions of iterations with and without the check alternate. The cost of
the check is the first decile of the iteration times with the check minus that without it. The difference of the medians
is printed too. The loop runs a scripted model, because the time of a real model would hide the costs. The costs are
given as a share of a generation step of a real model, which is measured separately: a small Llama in bf16 with random
weights. All times are CPU times of one thread, so that other processes do not add to them.

    check_totals        free + live == total                  step output    its rows, types and finish codes
    check_plan          the rules of a plan                   token ids      each below the vocabulary size
    finite              logits: the check of each row; flags: the check of the results
    guards              of get, send, poll and stats: contain, time, count and write the heartbeat
    heartbeat           the block of the step                 watchdog       the thread that reads the heartbeat
    ledger              bytes, deadlines and arrivals, for one request that comes and one that goes

The starvation check is not measured: it only runs for a plan that leaves out an active request.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from threading import Thread
from time import sleep, thread_time, thread_time_ns
from typing import Any

import numpy as np

from batch_manager import InferenceRequest
from batch_manager.clock import SystemClock
from batch_manager.loop import generation_loop
from batch_manager.loop.generation_loop import GenerationLoop
from batch_manager.tools.host_bench import Setting, Stopwatch, make_loop
from batch_manager.worker import WorkerControl, watch_worker

from .registry import Options, Summary

BATCH = 8
SHARE = 0.01
STEP_OF_A_GPU_US = 5000.0
ON_A_CPU = "finite logits"
A_PORTION = 5
PAIRS = {"Q": 200, "F": 2_000, "C": 10_000}
WARM_UP_ITERATIONS = 60
WATCHDOG_WAKES = 40
REAL_STEPS = 8

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16"}

Replacement = tuple[object, str, Any]     # object, name of the check in it, replacement


def nothing(*_: object, **__: object) -> None:
    """Do nothing. This function replaces a check."""


def replacements(loop: GenerationLoop) -> dict[str, list[Replacement]]:
    """Return, for the name of each check, the replacements of attributes of `loop` that remove the check."""
    callbacks, runner = loop.callbacks, loop._runner
    return {
        "check_totals": [(loop.kv, "check_totals", nothing)],
        "check_plan": [(generation_loop, "check_plan", nothing)],
        "step output": [(runner._check, "checked", lambda batch, output, asked: output)],
        "token ids": [(runner._check, "_without_invalid_tokens", lambda output: output)],
        "guards": [(callbacks.fetched, "ask", callbacks.fetched._get), (callbacks, "send", callbacks._send),
                   (callbacks, "poll_stops", callbacks._poll), (callbacks, "return_stats", callbacks._stats)],
        "heartbeat": [(runner, "_in_step", nullcontext())],
    }


@contextmanager
def without(replaced: list[Replacement]) -> Iterator[None]:
    before = [(where, name, vars(where).get(name)) for where, name, _ in replaced]
    for where, name, instead in replaced:
        setattr(where, name, instead)
    try:
        yield
    finally:
        for where, name, was in before:
            if was is None:
                delattr(where, name)
            else:
                setattr(where, name, was)


def new_loop(iterations: int) -> GenerationLoop:
    """Return a warmed-up loop in which BATCH requests generate."""
    setting = Setting(batch=BATCH, iterations=iterations + WARM_UP_ITERATIONS, streaming=False,
                      policy="max_utilization")
    loop, _ = make_loop(setting, Stopwatch())
    for holder in (loop, loop.reporter):                          # remove its stopwatches
        for name in [name for name, value in vars(holder).items() if getattr(value, "__name__", "") == "timed"]:
            delattr(holder, name)
    for _ in range(WARM_UP_ITERATIONS):
        loop.step(accept_new=True)
    return loop


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a check in microseconds per iteration.

    by_median   difference of the medians
    by_decile   difference of the first deciles, which other load on the machine disturbs least
    whole       first decile of an iteration with the check
    """

    by_median: float
    by_decile: float
    whole: float = 0.0

    @staticmethod
    def of(present: list[int], absent: list[int]) -> "Cost":
        medians, deciles = ([quantiles(taken, n=10)[place] / 1e3 for taken in (present, absent)] for place in (4, 0))
        return Cost(medians[0] - medians[1], deciles[0] - deciles[1], deciles[0])


def timed(what: Callable[[], object]) -> int:
    """Call `what` and return the CPU time of the call in nanoseconds."""
    began = thread_time_ns()
    what()
    return thread_time_ns() - began


def cost(check: str, pairs: int) -> Cost:
    """Return the cost of a check per iteration, from at least `pairs` iterations with and as many without the check."""
    portions = -(-pairs // A_PORTION)
    loop = new_loop(2 * portions * (A_PORTION + 1))
    replaced = replacements(loop)[check]
    present: list[int] = []
    absent: list[int] = []

    def run_a_portion(taken: list[int]) -> None:
        loop.step(accept_new=True)                  # the interpreter specializes the code again
        taken += [timed(partial(loop.step, accept_new=True)) for _ in range(A_PORTION)]

    for portion in range(portions):
        if portion % 2:                             # the order alternates, too
            run_a_portion(present)
        with without(replaced):
            run_a_portion(absent)
        if not portion % 2:
            run_a_portion(present)
    loop.backend.close()
    return Cost.of(present, absent)


def ledger_cost(pairs: int) -> Cost:
    """Return the cost of the bookkeeping for one request, from its acceptance to its end.

    With eight requests of 128 output tokens each, one request begins and one ends every sixteen iterations.
    """
    intake = new_loop(1).intake
    admitted = intake.admission.admit(InferenceRequest(10**6, {"input_ids": [1] * 16, "request_output_len": 4}))

    unanswered = intake._unanswered

    def come_and_go() -> None:
        unanswered.undecided.append(admitted)
        unanswered.accept(10**6)
        intake._note_accepted(admitted)
        intake.forget(10**6)
        del unanswered.alive[10**6]
        intake.arrived.clear()

    return Cost.of([timed(come_and_go) for _ in range(pairs)], [timed(nothing) for _ in range(pairs)])


def watchdog_us(iteration_us: float) -> float:
    """Return the CPU time of the watchdog in microseconds per iteration of `iteration_us` microseconds.

    The watchdog wakes four times in each period of hang_warning_s.
    """
    default_s, quick_s = 30.0, 0.02
    control = WorkerControl(SystemClock(), quick_s)
    spent: list[float] = []

    def watch() -> None:
        began = thread_time()
        watch_worker(control)
        spent.append(thread_time() - began)

    thread = Thread(target=watch)
    thread.start()
    for _ in range(WATCHDOG_WAKES):
        control.heartbeat.beat("loop", control.clock.monotonic())
        sleep(quick_s / 4)
    control.stopped.set()
    thread.join()
    return spent[0] * 1e6 / WATCHDOG_WAKES * iteration_us / (default_s / 4 * 1e6)


def finite_costs(pairs: int) -> dict[str, Cost]:
    """Return the costs of both checks for finite logits: of the rows' largest logits, and of the flags in the results.

    Only a step on a CPU pays the first cost. On a GPU, the sampling kernel checks the largest logits.
    """
    import torch

    maxima, others, flags = torch.ones(BATCH), np.ones(BATCH, bool), np.ones(BATCH, bool)
    idle = [timed(nothing) for _ in range(pairs)]
    return {ON_A_CPU: Cost.of([timed(lambda: others & maxima.isfinite().numpy()) for _ in range(pairs)], idle),
            "finite flags": Cost.of([timed(lambda: flags.all()) for _ in range(pairs)], idle)}


def real_iteration_us() -> float:
    """Return the median CPU time of a generation step of BATCH sequences of 128 tokens, in microseconds."""
    import torch

    from batch_manager import KvCacheConfig, TrtGptModelOptionalParams
    from batch_manager.handover import SlotSetup
    from batch_manager.runtime import packing
    from batch_manager.runtime.build_backend import build_native_backend
    from tests.benchmarks.deterministic import Sequences

    context, threads = 128, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL_LLAMA))
        backend = build_native_backend(folder, TrtGptModelOptionalParams(
            device="cpu", dtype="bfloat16", load_format="dummy", max_batch_size=BATCH, max_seq_len=512,
            num_threads=1, kv_cache_config=KvCacheConfig(max_tokens=BATCH * 512)),
            layout=packing.packed, num_slots=BATCH)
    try:
        sequences = Sequences(backend, BATCH, 512, SlotSetup())
        sequences.run_context(context)
        taken = []
        for _ in range(REAL_STEPS):
            began = thread_time()
            sequences.generate()
            taken.append(thread_time() - began)
    finally:
        backend.close()
        torch.set_num_threads(threads)
    return 1e6 * median(taken[2:])


def run(options: Options) -> Summary:
    pairs = PAIRS[options.tier]
    costs = {check: cost(check, pairs) for check in replacements(new_loop(1))}
    host = median(taken.whole for taken in costs.values())
    real = real_iteration_us()
    watchdog = watchdog_us(real)
    costs |= {"ledger": ledger_cost(pairs), **finite_costs(pairs), "watchdog": Cost(watchdog, watchdog)}
    by_median = sum(max(taken.by_median, 0.0) for taken in costs.values())
    total = sum(max(taken.by_decile, 0.0) for taken in costs.values())
    on_a_gpu = total - max(costs[ON_A_CPU].by_decile, 0.0)
    parts = ", ".join(f"{check} {taken.by_decile:.1f} ({taken.by_median:.1f})"
                      for check, taken in sorted(costs.items(), key=lambda item: -item[1].by_decile))
    summary = Summary(
        f"T16: checks in an iteration of {BATCH} requests: {total:.1f} us by first deciles ({by_median:.1f} by medians)"
        f": {parts}; that is {total / real:.2%} of {real / 1e3:.1f} ms (Llama of 135M, bf16, one thread of this CPU), "
        f"and without what only a CPU does {on_a_gpu / STEP_OF_A_GPU_US:.2%} of 5 ms; the loop and the scripted model "
        f"take {host:.0f} us")
    if total > SHARE * real:
        summary.failures.append(f"the checks take {total:.0f} us, more than {SHARE:.0%} of {real:.0f} us: "
                                "python -m tests.campaigns --suite T16")
    if on_a_gpu > SHARE * STEP_OF_A_GPU_US:
        summary.short.append(f"{on_a_gpu:.0f} us are more than {SHARE:.0%} of a step of 5 ms")
    return summary
