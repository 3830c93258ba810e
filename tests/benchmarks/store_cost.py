"""Measure what a prompt cache on disk costs requests that get nothing from it, and those that run while others load.

    python -m tests.benchmarks.store_cost --shape 135M

Throughput: --requests new prompts at once, in an engine without a directory and in one that saves all blocks, in turn.
Gaps: --streams requests generate while --arrivals prompts of --prompt tokens come, one every --every seconds, whose
blocks are in the cache, or on disk. The output has the ratios of each round and their medians: of tokens per second, of
processor time until the engine has saved and ended, and of the 99th percentile of the time between two tokens. The
weights are random, and the files are in the page cache.
"""

import argparse
import json
import platform
import tempfile
import threading
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

from .restart import BLOCK, LONGEST_WAIT_S, SHAPES


class Engine:
    """An engine, and the times at which the tokens of each request came."""

    def __init__(self, model: str, options: argparse.Namespace, disk: Path | None) -> None:
        self._pending: list[InferenceRequest] = []
        self.times: dict[int, list[float]] = {}
        self._left, self._all_ended, self._records = 0, threading.Event(), list[str]()
        cache = {} if disk is None else {"disk_cache_path": disk, "disk_cache_size": 1 << 34,
                                         "host_cache_size": options.host_bytes}
        longest = max(options.prompt + BLOCK, BLOCK + options.output) + BLOCK
        most = max(options.requests, options.streams + options.arrivals)
        self.manager = GptManager(
            model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, self._get, self._send,
            None, self._records.append, TrtGptModelOptionalParams(
                device="cpu", dtype=options.dtype, load_format="dummy", num_threads=options.threads,
                max_batch_size=most, max_num_tokens=512, max_seq_len=longest, enable_chunked_context=True,
                flush_stats_when_idle=True, kv_cache_config=KvCacheConfig(
                    enable_block_reuse=True, tokens_per_block=BLOCK, max_tokens=2 * most * longest, **cache)))

    def _get(self, most: int) -> list[InferenceRequest]:
        taken, self._pending = self._pending, []
        return taken

    def _send(self, request_id: int, tensors: Any, final: bool, error: str) -> None:
        assert not error, error
        self.times[request_id].append(perf_counter())
        if final:
            self._left -= 1
            if not self._left:
                self._all_ended.set()

    def ask(self, first_id: int, prompts: list[list[int]], count: int) -> None:
        self._left += len(prompts)
        self._all_ended.clear()
        self.times |= {first_id + number: [] for number in range(len(prompts))}
        self._pending = [*self._pending, *(
            InferenceRequest(first_id + number, {"input_ids": prompt, "request_output_len": count}, is_streaming=True)
            for number, prompt in enumerate(prompts))]
        self.manager.notify()

    def wait(self) -> None:
        assert self._all_ended.wait(LONGEST_WAIT_S)

    def end(self) -> dict[str, Any]:
        """Shut down, which saves what is left. Returns the last statistics."""
        assert self.manager.shutdown(timeout=LONGEST_WAIT_S)
        return json.loads(self._records[-1])


class Measurement:
    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self.folder, self.options, self.draw = folder, options, np.random.default_rng(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return self.draw.integers(0, SHAPES[self.options.shape]["vocab_size"], (count, length)).tolist()

    def throughput(self, disk: Path | None) -> tuple[float, float]:
        """Return (seconds until the last final, processor time until the engine has ended) for new prompts."""
        options = self.options
        engine = Engine(self.folder, options, disk)
        engine.ask(0, self.prompts(1, BLOCK), 2)
        engine.wait()
        began, spent = perf_counter(), process_time()
        engine.ask(1, self.prompts(options.requests, options.prompt), options.output)
        engine.wait()
        took = perf_counter() - began
        figures = engine.end()
        assert disk is None or figures["External Hit Tokens"] == 0
        return took, process_time() - spent

    def gap(self, disk: Path, prompts: list[list[int]], is_cached: bool) -> float:
        """Return the 99th percentile of the seconds between two tokens of running requests while `prompts` come."""
        options = self.options
        engine = Engine(self.folder, options, disk)
        if is_cached:
            for number, prompt in enumerate(prompts):
                engine.ask(1000 + number, [prompt], 1)
                engine.wait()
        before = json.loads(engine._records[-1])["External Hit Tokens"] if is_cached else 0
        engine.ask(0, self.prompts(options.streams, BLOCK), options.output)
        for number, prompt in enumerate(prompts):
            sleep(options.every)
            engine.ask(100 + number, [[*prompt, *self.prompts(1, BLOCK)[0]]], 2)
        engine.wait()
        loaded = engine.end()["External Hit Tokens"] - before
        assert (loaded == 0) == is_cached, f"{loaded} tokens were loaded"
        gaps = np.concatenate([np.diff(engine.times[number]) for number in range(options.streams)])
        return float(np.percentile(gaps, 99))


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return name -> its ratio in each round."""
    ratios: dict[str, list[float]] = {"tokens per second": [], "processor time": [], "p99 between tokens": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", **SHAPES[options.shape]}))
        measurement = Measurement(folder, options)
        for number in range(options.rounds):
            (without, spent_without), (took, spent) = (
                measurement.throughput(disk) for disk in (None, Path(folder, f"filled {number}")))
            ratios["tokens per second"].append(without / took)
            ratios["processor time"].append(spent / spent_without)
            disk, prompts = Path(folder, f"loaded {number}"), measurement.prompts(options.arrivals, options.prompt)
            engine = Engine(folder, options, disk)
            engine.ask(0, prompts, 1)
            engine.wait()
            engine.end()
            cached, loading = (measurement.gap(disk, prompts, is_cached) for is_cached in (True, False))
            ratios["p99 between tokens"].append(loading / cached)
            print("  ".join(f"{name} {found[-1]:.3f}" for name, found in ratios.items()), flush=True)
    return ratios


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="135M")
    add("--requests", type=at_least(1), default=8, help="of a measurement of throughput (8)")
    add("--prompt", type=at_least(5 * BLOCK), default=512, help="tokens of a prompt (512)")
    add("--output", type=at_least(2), default=64, help="tokens of each output, and of each stream (64)")
    add("--streams", type=at_least(1), default=4, help="running requests (4)")
    add("--arrivals", type=at_least(1), default=4, help="prompts that come meanwhile (4)")
    add("--every", type=float, default=0.5, help="seconds between two of them (0.5)")
    add("--rounds", type=at_least(1), default=3)
    add("--threads", type=at_least(1), default=1)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--host-bytes", type=at_least(0), default=256 << 20, help="host_cache_size (256 MiB)")
    options = parser.parse_args(arguments)
    ratios = measure(options)
    print(json.dumps({"ratios": {name: median(found) for name, found in ratios.items()}, "rounds": ratios,
                      "machine": platform.machine(), "torch": torch.__version__,
                      "options": {name: str(value) for name, value in vars(options).items()}}))


if __name__ == "__main__":
    main()
