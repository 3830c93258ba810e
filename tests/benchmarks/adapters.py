"""Measure the cost of LoRA adapters in generation steps on a CPU, against the same steps without.

    python -m tests.benchmarks.adapters --shape 135M --batch 32 --adapters 8 --rank 16

Four kinds of steps alternate in one process, so that a busy machine slows all of them: of an engine without
`peft_cache_config`, and of one with it, whose sequences have no adapter, adapters of q and v, or of all modules.
The output has the median time of each in milliseconds, and the median over the rounds of its speed, relative to the
step of the first kind in the same round. The weights are random. With --threads 1, times are CPU times of the thread,
which exclude other processes. Otherwise they are wall-clock times.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import numpy as np
import torch

from batch_manager.adapter_values import AdapterContent, AdapterPart
from batch_manager.config import KvCacheConfig, PeftCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import (
    AdapterLoad,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.native_backend import NativeBackend
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

SHAPES = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}}
TARGETS = {"q and v": ("attn_q", "attn_v"),
           "all modules": ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")}
KINDS = ("no cache", "no adapter", *TARGETS)
PROMPT, WARM_UP_ROUNDS, BLOCK = 64, 5, 16


class Sequences:
    """`count` generating sequences on one backend, in slots from `first_slot` on, with blocks of their own."""

    def __init__(self, backend: NativeBackend, first_slot: int, count: int, most_tokens: int,
                 pages: Sequence[tuple[int, ...]]) -> None:
        per_sequence = -(-most_tokens // BLOCK)
        self.backend, self.length = backend, PROMPT
        self.slots = np.arange(first_slot, first_slot + count, dtype=np.int32)
        tables = BlockTableUpdates(
            np.repeat(self.slots, per_sequence), np.tile(np.arange(per_sequence, dtype=np.int32), count),
            np.arange(first_slot * per_sequence, (first_slot + count) * per_sequence, dtype=np.int32))
        tokens = np.random.default_rng(0).integers(0, backend.info.vocab_size, PROMPT).astype(np.int32)
        setups = [SlotSetup(prompt_length=PROMPT, adapter_pages=pages[index * len(pages) // count] if pages else ())
                  for index in range(count)]             # requests of one adapter stand together
        context = tuple(ContextWork(slot, tokens, 0, True, setup.continuing(tokens))
                        for slot, setup in zip(self.slots.tolist(), setups))
        self._run(ScheduledBatch(iteration=0, context=context, block_table_updates=tables))

    def generate(self, clock: Callable[[], float]) -> float:
        """Run a step. Returns its seconds."""
        began = clock()
        self._run(ScheduledBatch(iteration=0, generation=GenerationWork(
            self.slots, np.full(len(self.slots), self.length, np.int32))))
        self.length += 1
        return clock() - began

    def _run(self, batch: ScheduledBatch) -> None:
        output = self.backend.start(batch).finish()
        assert not output.failures, output.failures


def make_content(backend: NativeBackend, modules: Sequence[str], rank: int, seed: int) -> AdapterContent:
    draw, parts = np.random.default_rng(seed), []
    for module in modules:
        for layer, (inputs, outputs) in enumerate(backend.info.adapter_modules.sizes[module]):
            parts.append(AdapterPart(module, layer, draw.normal(size=(rank, inputs)).astype(np.float32) / inputs**0.5,
                                     draw.normal(size=(outputs, rank)).astype(np.float32) / 100))
    return AdapterContent(b"", "float32", tuple(parts), sum(part.a.nbytes + part.b.nbytes for part in parts), rank)


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return kind -> {"ms": median time of a step, "speed": median of the ratios to "no cache"}."""
    rounds, batch = WARM_UP_ROUNDS + options.rounds, options.batch
    most_tokens = PROMPT + rounds + 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", **SHAPES[options.shape]}))
        params = TrtGptModelOptionalParams(
            device="cpu", dtype=options.dtype, load_format="dummy", num_threads=options.threads, max_batch_size=batch,
            max_num_tokens=batch * PROMPT, max_seq_len=most_tokens, kv_cache_config=KvCacheConfig(
                tokens_per_block=BLOCK, max_tokens=3 * batch * -(-most_tokens // BLOCK) * BLOCK))
        pages = 2 * options.adapters * options.rank
        projections = len(TARGETS["all modules"]) * SHAPES[options.shape]["num_hidden_layers"]
        plain, adapted = (build_native_backend(folder, params, layout=packing.packed, num_slots=3 * batch)
                          for params in (params, replace(params, peft_cache_config=PeftCacheConfig(
                              num_device_module_layer=pages * projections))))
    try:
        kinds, operations = [Sequences(plain, 0, batch, most_tokens, ())], []
        used = {kind: [] for kind in KINDS}
        for kind, modules in TARGETS.items():
            for index in range(options.adapters):
                first = len(operations) * options.rank
                used[kind].append(tuple(range(first, first + options.rank)))
                operations.append(AdapterLoad(index, used[kind][-1],
                                              make_content(adapted, modules, options.rank, index)))
        with torch.inference_mode():
            for operation in operations:
                adapted._operations._handlers[AdapterLoad](operation)
        kinds += [Sequences(adapted, number * batch, batch, most_tokens, used[kind])
                  for number, kind in enumerate(KINDS[1:])]
        clock = thread_time if options.threads == 1 else perf_counter
        seconds = [[sequences.generate(clock) for sequences in kinds] for _ in range(rounds)][WARM_UP_ROUNDS:]
    finally:
        plain.close()
        adapted.close()
    return {kind: {"ms": 1000 * median(each[number] for each in seconds),
                   "speed": median(each[0] / each[number] for each in seconds)} for number, kind in enumerate(KINDS)}


def table(results: dict[str, dict[str, float]]) -> str:
    return "\n".join(["| sequences have | ms | speed |", "|---|---|---|",
                      *(f"| {kind} | {row['ms']:.2f} | {row['speed']:.3f} |" for kind, row in results.items())])


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.adapters", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="135M", help="sizes of the model (135M)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    add("--threads", type=at_least(1), help="threads of a step (torch's setting)")
    add("--batch", type=at_least(1), default=32, help="sequences of a step (32)")
    add("--adapters", type=at_least(1), default=8, help="adapters of a step (8)")
    add("--rank", type=at_least(1), default=16, help="rank of each adapter (16)")
    add("--rounds", type=at_least(1), default=60, help="measured steps of each kind (60)")
    options = parser.parse_args(argv)
    results = measure(options)
    print(table(results))
    print(json.dumps({"tool": "adapters", **vars(options), "python": platform.python_version(),
                      "torch": torch.__version__, "results": results}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
