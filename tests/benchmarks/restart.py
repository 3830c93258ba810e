"""Measure how much sooner a prompt reaches its first token after a restart, with a prompt cache on disk.

    python -m tests.benchmarks.restart --shape 135M --tokens 4000

In each round, three engines run one after another in this process: one without a directory, one that saves the prompt,
and one that begins with what the directory has. Each first answers another prompt, so that nothing is made during the
measurement. The output has the median times to the first token in seconds, and the median over the rounds of the ratio
of the first and the last. The weights are random. The files are in the page cache, because they were just written.
"""

import argparse
import json
import platform
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
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

from . import adapters

SHAPES = {**adapters.SHAPES, "tiny": {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True}}
BLOCK, CHUNK, LONGEST_WAIT_S = 64, 512, 600
KINDS = ("no directory", "saves", "after a restart")


class Engine:
    """An engine with random weights, and the times at which the tokens of each request came.

    longest, most   tokens of a sequence, and number of requests at a time
    num_tokens      of the KV cache
    cache           further options of KvCacheConfig
    """

    def __init__(self, model: str, options: argparse.Namespace, longest: int, most: int, **cache: Any) -> None:
        self._pending: list[InferenceRequest] = []
        self.times: dict[int, list[float]] = {}
        self._left, self._all_ended, self.records = 0, threading.Event(), list[str]()
        self.num_tokens = 2 * most * longest
        self.manager = GptManager(
            model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, self._get, self._send,
            None, self.records.append, TrtGptModelOptionalParams(
                device="cpu", dtype=options.dtype, load_format="dummy", num_threads=options.threads,
                max_batch_size=most, max_num_tokens=CHUNK, max_seq_len=longest, enable_chunked_context=True,
                flush_stats_when_idle=True, kv_cache_config=KvCacheConfig(
                    enable_block_reuse=True, tokens_per_block=BLOCK, max_tokens=self.num_tokens, **cache)))

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
        return json.loads(self.records[-1])


def on_disk(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {"disk_cache_path": path, "disk_cache_size": 1 << 34, "host_cache_size": options.host_bytes}


def write_config(folder: str, shape: str) -> None:
    Path(folder, "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", **SHAPES[shape]}))


def first_token_s(engine: Engine, request_id: int, prompt: list[int]) -> float:
    """Answer a prompt. Returns the seconds until its first token."""
    began = perf_counter()
    engine.ask(request_id, [prompt], 2)
    engine.wait()
    return engine.times[request_id][0] - began


def measure(options: argparse.Namespace, note: Callable[[str], None] = lambda line: None) -> dict[str, list[float]]:
    """Return kind -> seconds to the first token in each round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    draw = np.random.default_rng(0)
    vocab = SHAPES[options.shape]["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, options.shape)
        for number in range(options.rounds):
            warm, prompt = (draw.integers(0, vocab, count).tolist() for count in (CHUNK, options.tokens))
            for kind in KINDS:
                cache = {} if kind == KINDS[0] else on_disk(Path(folder, f"cache {number}"), options)
                engine = Engine(folder, options, options.tokens + BLOCK, 2, **cache)
                first_token_s(engine, 1, [*warm[:-1], len(kind)])
                seconds[kind].append(first_token_s(engine, 2, prompt))
                figures = engine.end()
                assert kind != KINDS[2] or figures["Store Loaded Blocks"] >= (options.tokens - 1) // BLOCK
            note("  ".join(f"{kind} {times[-1]:.3f} s" for kind, times in seconds.items()))
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--tokens", type=at_least(CHUNK), default=4000, help="tokens of the prompt (4000)")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--host-bytes", type=at_least(0), default=256 << 20, help="host_cache_size (256 MiB)")
    options = parser.parse_args(arguments)
    seconds = measure(options, print)
    ratios = [without / restarted for without, restarted in zip(seconds[KINDS[0]], seconds[KINDS[2]])]
    result = {"seconds": {kind: median(times) for kind, times in seconds.items()}, "ratio": median(ratios),
              "ratios": ratios, "machine": platform.machine(), "torch": torch.__version__,
              "options": {name: str(value) for name, value in vars(options).items()}}
    print(f"first token {result['ratio']:.1f} times sooner ({min(ratios):.1f} to {max(ratios):.1f})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
