"""Measure the cost of the option `deterministic`, by running steps of one model with and without this option.

    python -m tests.benchmarks.deterministic --model FOLDER --threads 1

The program times steps of the backend on a CPU, without the loop: generation steps of sequences with --context tokens,
and a step that computes the whole context of one sequence. Steps with and without the option alternate in one process,
so that a busy machine slows both. The output has the median and the minimum of each in milliseconds, and their ratios.
With --threads 1, times are CPU times of the thread, which exclude other processes. Otherwise they are wall-clock times.
Requests are greedy, without log-probabilities. With --sample, requests use top-p and return log-probabilities, with
--penalty a repetition penalty as well, which is a stage, and with --report the five likeliest tokens. With --fp8-cache,
the cost of keys and values in FP8 is measured in place of that of the option.
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter, thread_time

import numpy as np
import torch

from batch_manager.config import DTYPES, LOAD_FORMATS, KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.native_backend import NativeBackend
from batch_manager.sampling_config import SamplingConfig
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

WARM_UP_STEPS = 2


class Sequences:
    """Sequences of equal length on one backend. Each method runs a step. Sequence i has slot i and its own blocks."""

    def __init__(self, backend: NativeBackend, count: int, most_tokens: int, setup: SlotSetup) -> None:
        self.backend, self.setup = backend, setup
        per_sequence = -(-most_tokens // backend.info.tokens_per_block)
        slots = np.repeat(np.arange(count, dtype=np.int32), per_sequence)
        indices = np.tile(np.arange(per_sequence, dtype=np.int32), count)
        self.tables = BlockTableUpdates(slots, indices, np.arange(count * per_sequence, dtype=np.int32))
        self.slots = np.arange(count, dtype=np.int32)
        self.length = 0

    def run_context(self, length: int) -> None:
        """Compute the whole context of each sequence, `length` random tokens, in one step."""
        tokens = np.random.default_rng(0).integers(0, self.backend.info.vocab_size, length).astype(np.int32)
        setup = replace(self.setup, history=tokens)
        context = tuple(ContextWork(slot, tokens, 0, True, setup) for slot in self.slots.tolist())
        self._run(ScheduledBatch(iteration=0, context=context, block_table_updates=self.tables))
        self.length = length

    def generate(self) -> None:
        lengths = np.full(len(self.slots), self.length, np.int32)
        self._run(ScheduledBatch(iteration=0, generation=GenerationWork(self.slots, lengths)))
        self.length += 1

    def _run(self, batch: ScheduledBatch) -> None:
        output = self.backend.start(batch).finish()
        assert not output.failures, output.failures


def in_turn(normal: Callable[[], None], changed: Callable[[], None], steps: int, clock: Callable[[], float]
            ) -> dict[str, float]:
    """Run both functions alternately, `steps` times each, and return their times and ratios.

    Times are the median and the minimum in milliseconds. Ratios are changed / normal. The first WARM_UP_STEPS
    runs of each function are not counted.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(WARM_UP_STEPS + steps):
        for run, taken in zip((normal, changed), seconds, strict=True):
            began = clock()
            run()
            if step >= WARM_UP_STEPS:
                taken.append(clock() - began)
    before, after = seconds
    return {"normal_ms": 1000 * median(before), "normal_best_ms": 1000 * min(before),
            "changed_ms": 1000 * median(after), "changed_best_ms": 1000 * min(after),
            "ratio": median(after) / median(before), "ratio_of_best": min(after) / min(before)}


def measure(options: argparse.Namespace) -> list[dict]:
    """Measure the times of generation steps of each batch size, and of steps that compute the context of one sequence.

    Returns one record for each batch size, and one for the context steps.
    """
    most = max(options.context + WARM_UP_STEPS + options.steps, options.prefill) + 1
    largest = max(*options.batch, 1)
    blocks = largest * -(-most // options.tokens_per_block)
    backends = [build_native_backend(options.model, TrtGptModelOptionalParams(
        deterministic=changed and not options.fp8_cache, device="cpu", dtype=options.dtype,
        load_format=options.load_format, num_threads=options.threads, max_batch_size=largest,
        kv_cache_config=KvCacheConfig(tokens_per_block=options.tokens_per_block,
                                      max_tokens=blocks * options.tokens_per_block,
                                      kv_cache_dtype="fp8" if changed and options.fp8_cache else "auto")),
        layout=packing.packed, num_slots=largest) for changed in (False, True)]
    setup = SlotSetup()
    if options.sample or options.penalty or options.report:
        setup = SlotSetup(SamplingConfig(temperature=0.8, top_p=0.9, repetition_penalty=1.1 if options.penalty else 1),
                          return_log_probs=True, top_log_probs=5 if options.report else 0)
    clock, results = thread_time if options.threads == 1 else perf_counter, []
    try:
        for batch in options.batch:
            both = [Sequences(backend, batch, most, setup) for backend in backends]
            for sequences in both:
                sequences.run_context(options.context)
            results.append({"what": "generation", "batch": batch, "context": options.context,
                            **in_turn(both[0].generate, both[1].generate, options.steps, clock)})
        both = [Sequences(backend, 1, most, setup) for backend in backends]
        results.append({"what": "context", "batch": 1, "context": options.prefill, **in_turn(
            *(lambda of=of: of.run_context(options.prefill) for of in both), max(3, options.steps // 4),
            clock)})
    finally:
        for backend in backends:
            backend.close()
    return results


def table(results: Sequence[dict], changed: str) -> str:
    lines = [f"| step | sequences | tokens before or in it | normal ms (best) | {changed} ms (best) | ratio (best) |",
             "|---|---|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['batch']} | {row['context']} "
              f"| {row['normal_ms']:.2f} ({row['normal_best_ms']:.2f}) "
              f"| {row['changed_ms']:.2f} ({row['changed_best_ms']:.2f}) "
              f"| {row['ratio']:.2f} ({row['ratio_of_best']:.2f}) |" for row in results]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.deterministic", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder of a checkpoint")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights for a config.json (auto)")
    add("--dtype", choices=DTYPES, default="auto", help="(auto)")
    add("--threads", type=at_least(1), help="threads of a step (torch's setting)")
    add("--batch", type=at_least(1), nargs="+", default=[1, 8, 32], help="sequences that generate (1 8 32)")
    add("--context", type=at_least(1), default=128, help="tokens of each sequence before the first measured step (128)")
    add("--prefill", type=at_least(1), default=512, help="length of the context that is computed in one step (512)")
    add("--steps", type=at_least(1), default=20, help="measured steps per setting and mode (20)")
    add("--tokens-per-block", type=int, default=64, help="tokens in a block of the KV cache (64)")
    add("--sample", action="store_true", help="top-p and log-probabilities instead of greedy")
    add("--penalty", action="store_true", help="as --sample, with a repetition penalty")
    add("--report", action="store_true", help="as --sample, and return the five likeliest tokens")
    add("--fp8-cache", action="store_true", help="measure keys and values in FP8 instead")
    options = parser.parse_args(argv)
    results, changed = measure(options), "FP8 cache" if options.fp8_cache else "deterministic"
    print(table(results, changed))
    print(json.dumps({"tool": "deterministic", "changed": changed, "python": platform.python_version(),
                      "torch": torch.__version__, "threads": options.threads, "dtype": options.dtype,
                      "sample": options.sample, "penalty": options.penalty, "report": options.report,
                      "results": results}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
