"""Measure what a prompt cache on disk costs requests that get nothing from it, and those that run while others load.

    python -m tests.benchmarks.store_cost --shape 135M

Throughput: --requests new prompts at once, in an engine without a directory and in one that saves all blocks, in turn.
Gaps: --streams requests of --stream-output tokens generate while --arrivals prompts of --prompt tokens come, one
every --every seconds, whose blocks are in the cache, or on disk; rounds take turns in which of the two comes first.
Before that, every block of the pool has been written once, because the first write to a block makes the system
provide its memory, which takes longer than a copy. The output has the ratios of each round and their medians: of
tokens per second, of processor time until the engine has saved and ended, and of the 99th percentile of the time
between two tokens. The weights are random, and the files are in the page cache.
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

import numpy as np
import torch

from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

from .restart import BLOCK, SHAPES, Engine, on_disk, write_config


class Measurement:
    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self.folder, self.options, self.draw = folder, options, np.random.default_rng(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return self.draw.integers(0, SHAPES[self.options.shape]["vocab_size"], (count, length)).tolist()

    def engine(self, disk: Path | None) -> Engine:
        options = self.options
        longest = BLOCK + max(options.prompt + BLOCK, options.prompt + options.output, BLOCK + options.stream_output)
        most = max(options.requests, options.streams + options.arrivals)
        return Engine(self.folder, options, longest, most, **({} if disk is None else on_disk(disk, options)))

    def throughput(self, disk: Path | None) -> tuple[float, float]:
        """Return (seconds until the last final, processor time until the engine has ended) for new prompts."""
        options = self.options
        engine = self.engine(disk)
        engine.ask(0, self.prompts(1, BLOCK), 2)
        engine.wait()
        began, spent = perf_counter(), process_time()
        engine.ask(1, self.prompts(options.requests, options.prompt), options.output)
        engine.wait()
        took = perf_counter() - began
        figures = engine.end()
        assert disk is None or figures["External Hit Tokens"] == 0
        return took, process_time() - spent

    def gaps(self, disk: Path, stored: list[list[int]], loaded_first: bool) -> dict[str, float]:
        """Return the 99th percentile of the seconds between two tokens of running requests, by what comes meanwhile.

        Both kinds of prompts come in one engine, because the place of the weights in memory makes one engine up to a
        fifth slower than the next.
        """
        options, draw = self.options, self.prompts
        engine = self.engine(disk)
        for number in range(-(-engine.num_tokens // options.prompt)):
            engine.ask(10_000 + number, draw(1, options.prompt), 1)
            engine.wait()
        cached = draw(options.arrivals, options.prompt)
        for number, prompt in enumerate(cached):
            engine.ask(1000 + number, [prompt], 1)
            engine.wait()
        found = {}
        for first_id, is_loaded in ((2000, loaded_first), (3000, not loaded_first)):
            before = json.loads(engine.records[-1])["External Hit Tokens"]
            engine.ask(first_id, draw(options.streams, BLOCK), options.stream_output)
            for number, prompt in enumerate(stored if is_loaded else cached):
                sleep(options.every)
                engine.ask(first_id + 100 + number, [[*prompt, *draw(1, BLOCK)[0]]], 2)
            engine.wait()
            loaded = json.loads(engine.records[-1])["External Hit Tokens"] - before
            wanted = is_loaded * options.arrivals * (options.prompt // BLOCK * BLOCK)
            assert loaded == wanted, f"{loaded} tokens were loaded, not {wanted}"
            gaps = [np.diff(engine.times[first_id + number]) for number in range(options.streams)]
            found["loaded" if is_loaded else "cached"] = float(np.percentile(np.concatenate(gaps), 99))
        engine.end()
        return found


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return name -> its ratio in each round."""
    ratios: dict[str, list[float]] = {"tokens per second": [], "processor time": [], "p99 between tokens": []}
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, options.shape)
        measurement = Measurement(folder, options)
        for number in range(options.rounds):
            (without, spent_without), (took, spent) = (
                measurement.throughput(disk) for disk in (None, Path(folder, f"filled {number}")))
            ratios["tokens per second"].append(without / took)
            ratios["processor time"].append(spent / spent_without)
            disk, prompts = Path(folder, f"loaded {number}"), measurement.prompts(options.arrivals, options.prompt)
            engine = measurement.engine(disk)
            engine.ask(0, prompts, 1)
            engine.wait()
            engine.end()
            found = measurement.gaps(disk, prompts, loaded_first=number % 2 == 0)
            ratios["p99 between tokens"].append(found["loaded"] / found["cached"])
            print("  ".join(f"{name} {found[-1]:.3f}" for name, found in ratios.items()), flush=True)
    return ratios


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="135M")
    add("--requests", type=at_least(1), default=8, help="of a measurement of throughput (8)")
    add("--prompt", type=at_least(5 * BLOCK), default=512, help="tokens of a prompt (512)")
    add("--output", type=at_least(2), default=64, help="tokens of each output (64)")
    add("--streams", type=at_least(1), default=4, help="running requests (4)")
    add("--stream-output", type=at_least(2), default=400, help="tokens of each of them (400)")
    add("--arrivals", type=at_least(1), default=20, help="prompts that come meanwhile (20)")
    add("--every", type=float, default=0.5, help="seconds between two of them (0.5)")
    add("--rounds", type=at_least(1), default=6)
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
