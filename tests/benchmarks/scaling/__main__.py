"""Measure how the time of an iteration grows with batch size, context length, and the number of waiting requests.

    python -m tests.benchmarks.scaling --model FOLDER --threads 2 --out scaling.json
    python -m tests.benchmarks.scaling.draw scaling.json --out FOLDER                        plots and tables

There are three series. Each varies one number:

    batch     decode steps of 1, 2, 4, ... requests, each with --batch-context tokens in the KV cache
    context   decode steps of --context-batch requests with contexts of different lengths
    waiting   host time of an iteration with different numbers of requests that are not in the step, while --generating
              requests generate with a scripted model (no device). Each number of requests is measured twice: the
              requests are "active", so that the scheduler scans them in every iteration, or "queued" by the manager

A decode step is one whole iteration of the engine: get, schedule, the step of the model, one token for every request,
poll, statistics. Decoding is greedy, without streaming, and the loop runs without a worker thread. Prompts are random
tokens of equal length without shared prefixes. After a few generation steps of the full batch, the program times
--steps iterations.

Each setting has the median, minimum, 10th and 90th percentile of the wall-clock time of its iterations. `context` is
the prompt length; `mean_context` is the mean number of tokens of a request in the KV cache during the measurement.
`foreign_cores` is the number of cores that other processes and the hypervisor used. If it is not close to 0, measure
again. Times of the series `waiting` are in microseconds, all others in milliseconds. The program needs Linux, because
it reads /proc.
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from batch_manager.arguments import Callbacks, EngineArguments
from batch_manager.build import build_loop
from batch_manager.config import DTYPES, LOAD_FORMATS, KvCacheConfig, Parts, TrtGptModelOptionalParams
from batch_manager.errors import BatchManagerError
from batch_manager.models import read_spec
from batch_manager.requests.inference_request import InferenceRequest
from batch_manager.tools.bench.process_meter import ProcessMeter
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.host_bench import Setting
from batch_manager.tools.host_bench import measure as measure_host
from batch_manager.tools.interrupts import interrupts_between_steps
from batch_manager.tools.provenance import commit_of_the_checkout, machine, versions
from batch_manager.tools.workload import FIRST_ORDINARY_TOKEN, at_least

WARM_UP_STEPS = 5
HOST_ITERATIONS = 300


class DecodeSteps:
    """An engine whose iterations are timed while a full batch generates.

    settings   (number of requests, prompt length) of each later call of `measure`; the KV cache is large enough for
               all of them

    `check_interrupt`, which a caller may set, is called after each iteration.
    """

    def __init__(self, options: argparse.Namespace, settings: Sequence[tuple[int, int]]) -> None:
        self.check_interrupt: Callable[[], None] = lambda: None
        self._arriving: deque[InferenceRequest] = deque()
        self._stops: set[int] = set()
        self._errors: list[str] = []
        self._record = "{}"
        self._next_id = 0
        self._random = np.random.default_rng(0)
        # A request generates while the prompts of the others are computed, in the worst case one prompt per step.
        self._output_len = WARM_UP_STEPS + options.steps + 2
        largest, size = max(batch for batch, _ in settings), KvCacheConfig().tokens_per_block
        blocks = max(batch * (-(-(context + self._output_len + batch) // size) + 1) for batch, context in settings)
        params = TrtGptModelOptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=blocks * size, enable_block_reuse=False),
            device="cpu", dtype=options.dtype, load_format=options.load_format, num_threads=options.threads,
            cpu_compile=options.cpu_compile, max_batch_size=largest, max_num_tokens=options.max_tokens_per_step)
        self._loop = build_loop(
            EngineArguments(model_path=options.model, optional_params=params, exclude_input_in_output=True),
            Callbacks(self._get, self._send, self._poll, self._keep), Parts())

    def measure(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Time `steps` decode steps of a batch. Raises RuntimeError if a request fails."""
        ids = range(self._next_id, self._next_id + batch)
        self._next_id += batch
        vocab_size = self._loop.limits.vocab_size
        for request_id in ids:
            prompt = self._random.integers(min(FIRST_ORDINARY_TOKEN, vocab_size - 1), vocab_size, context)
            self._arriving.append(InferenceRequest(request_id, {
                "input_ids": prompt.astype(np.int32), "request_output_len": self._output_len + batch, "end_id": -1}))
        self._turn()
        while not all(request.is_generating for request in self._loop.active):
            self._turn()
        for _ in range(WARM_UP_STEPS):
            self._turn()

        requests = list(self._loop.active)
        before, seconds, threads, meter = sum(len(request.tokens[0]) for request in requests), [], [], ProcessMeter()
        meter.start()
        for _ in range(steps):
            began = perf_counter()
            self._loop.step(accept_new=True)
            seconds.append(perf_counter() - began)
            self.check_interrupt()
            threads.append(json.loads(self._record).get("Compute Threads"))
        meter.stop()
        after = sum(len(request.tokens[0]) for request in requests)
        assert len(requests) == len(self._loop.active) == batch, "requests ended during the measurement"
        assert after - before == batch * steps, "an iteration was not a decode step of the whole batch"

        self._stops.update(ids)
        while not self._loop.is_empty:
            self._turn()
        self._stops.clear()
        ms = spread([1e3 * one for one in seconds])
        return {"batch": batch, "context": context, "mean_context": round((before + after) / 2 / batch, 1),
                "steps": steps, "ms": ms, "tokens_per_second": round(1e3 * batch / ms["median"], 1),
                "compute_threads": None if None in threads else float(np.mean(threads)),
                "foreign_cores": round(meter.cpu["foreign_cores"] + meter.cpu["steal_cores"], 2)}

    def close(self) -> None:
        self._loop.backend.close()

    def _turn(self) -> None:
        self._loop.step(accept_new=True)
        self.check_interrupt()
        if self._errors:
            raise RuntimeError(f"a request failed: {self._errors[0]}")

    def _get(self, max_num_requests: int) -> list[InferenceRequest]:
        return [self._arriving.popleft() for _ in range(min(max_num_requests, len(self._arriving)))]

    def _send(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        if error_message:
            self._errors.append(error_message)

    def _poll(self) -> set[int]:
        return self._stops

    def _keep(self, record: str) -> None:
        self._record = record


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum, and the 10th and 90th percentile of the times."""
    p10, median, p90 = np.percentile(times, (10, 50, 90))
    return {name: round(float(value), 3)
            for name, value in (("median", median), ("min", min(times)), ("p10", p10), ("p90", p90))}


def measure_waiting(generating: int, waiting: int, iterations: int) -> list[dict[str, Any]]:
    """Measure the host time of an iteration in which `generating` requests generate and `waiting` others do not run.

    Returns two records. In the first, the others are active requests beyond a full batch. In the second, they are in
    the manager's queue.
    """
    rows = []
    for where in ("active", "queued"):
        numbers = {"waiting" if where == "active" else "queued": waiting}
        host = measure_host(Setting(batch=generating, iterations=iterations, streaming=False,
                                    policy="guaranteed_no_evict", **numbers))
        rows.append({"where": where, "waiting": waiting, "generating": generating, "iterations": iterations,
                     "undisturbed": host["undisturbed"], "us": host["host_us"], "ratio": host["ratio"],
                     "phases_us": host["phases_us"]})
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the three series of the module docstring, and return them with the machine and the model.

    Raises ValueError if a request would exceed the model's positions, RuntimeError if a request fails, and the
    exceptions of building an engine.
    """
    spec = read_spec(options.model)
    settings = [(batch, options.batch_context) for batch in options.batches]
    settings += [(options.context_batch, context) for context in options.contexts]
    longest = max(context + WARM_UP_STEPS + options.steps + 2 + batch for batch, context in settings)
    if longest > spec.max_position_embeddings:
        raise ValueError(f"a request would have up to {longest} tokens; the model has positions for "
                         f"{spec.max_position_embeddings}; reduce --contexts, --batch-context or --steps")
    header = {"tool": "scaling", "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
              "commit": commit_of_the_checkout(), "machine": machine(), "versions": versions("torch", "numpy")}
    engine = DecodeSteps(options, settings)
    try:
        with interrupts_between_steps() as engine.check_interrupt:
            rows = [engine.measure(batch, context, options.steps) for batch, context in settings]
    finally:
        engine.close()
    waiting = [row for count in options.waiting
               for row in measure_waiting(options.generating, count, options.host_iterations)]
    return {
        **header,
        "model": {"architecture": spec.architecture, "hidden_size": spec.hidden_size, "layers": spec.num_layers,
                  "heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "head_size": spec.head_size,
                  "vocab_size": spec.vocab_size, "weights": spec.num_weights},
        "command": command_of(options), "dtype": options.dtype, "threads": options.threads,
        "cpu_compile": options.cpu_compile,
        "batch": rows[: len(options.batches)], "context": rows[len(options.batches):], "waiting": waiting,
    }


def command_of(options: argparse.Namespace) -> str:
    """Return a command that repeats the measurement, with placeholders for the paths."""
    parts = ["python -m tests.benchmarks.scaling --model FOLDER --out FILE.json", f"--dtype {options.dtype}",
             f"--threads {options.threads}"]
    if options.cpu_compile is not None:
        parts.append("--cpu-compile" if options.cpu_compile else "--no-cpu-compile")
    if options.load_format != "auto":
        parts.append(f"--load-format {options.load_format}")
    for name in ("batches", "batch_context", "contexts", "context_batch", "max_tokens_per_step", "steps",
                 "waiting", "generating", "host_iterations"):
        value = getattr(options, name)
        numbers = value if isinstance(value, list) else [value]
        parts.append(f"--{name.replace('_', '-')} {' '.join(map(str, numbers))}")
    return " ".join(parts)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tests.benchmarks.scaling", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a checkpoint")
    add("--out", type=Path, required=True, help="output file (JSON)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="data type of weights and KV cache (bfloat16)")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights for a config.json (auto)")
    add("--threads", type=at_least(1), default=2, help="most threads of a step (2)")
    add("--cpu-compile", action=argparse.BooleanOptionalAction, default=None,
        help="run steps in compiled code (if the model and the processor allow it)")
    add("--batches", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="(1 2 4 8 16 32 64)")
    add("--batch-context", type=at_least(1), default=256, help="prompt length in the batch series (256)")
    add("--contexts", type=at_least(1), nargs="+", default=[128, 512, 1024, 2048], help="(128 512 1024 2048)")
    add("--context-batch", type=at_least(1), default=8, help="requests in the context series (8)")
    add("--max-tokens-per-step", type=at_least(1), default=8192, help="tokens in one step, for the prompts (8192)")
    add("--steps", type=at_least(1), default=40, help="timed iterations per setting (40)")
    add("--waiting", type=at_least(0), nargs="+", default=[0, 256, 1024, 4096], help="(0 256 1024 4096)")
    add("--generating", type=at_least(1), default=256, help="generating requests in the waiting series (256)")
    add("--host-iterations", type=at_least(1), default=HOST_ITERATIONS,
        help=f"timed iterations per number of waiting requests ({HOST_ITERATIONS})")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    # torch reads this variable on import, for all of its threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    try:
        result = measure(options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    except (BatchManagerError, OSError, RuntimeError, ValueError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    for series in ("batch", "context"):
        for row in result[series]:
            print(f"{row['batch']:>5} requests of {row['mean_context']:>7} tokens: {row['ms']['median']:8.2f} ms "
                  f"({row['ms']['p10']:.2f} to {row['ms']['p90']:.2f}), others used {row['foreign_cores']} cores")
    for row in result["waiting"]:
        print(f"{row['waiting']:>5} waiting requests, {row['where']}: {row['us']['median']:8.1f} us of the host")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
