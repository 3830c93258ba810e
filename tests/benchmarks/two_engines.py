"""Measure the time between tokens of running requests while long prompts arrive: one engine against two.

    python -m tests.benchmarks.two_engines --shape 135M --prompt 1024

`one` and `one, chunks` are an engine with two threads, without and with chunks of --chunk tokens of a prompt in a step.
`two` are two engines with one thread each: one computes the long prompts, the other continues them and runs the rest.
Each engine has a process of its own. The settings take turns, --rounds times. In each round, --streams requests
generate while --arrivals long prompts come, one every --every seconds. The output has, pooled over the rounds,
percentiles of the time between two tokens of a running request and of the time to the first token of a long prompt, and
the bytes that were handed over for a prompt. The weights are random.
"""

import argparse
import asyncio
import json
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from batch_manager import KvCacheConfig, KvTransferConfig, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

from .adapters import SHAPES

SETTINGS = ("one", "one, chunks", "two")
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
SHORT_PROMPT, OUTPUT_OF_LONG, BLOCK, LONGEST_WAIT_S = 32, 8, 64, 900


class Engines:
    """The engines of a setting: `first` computes long prompts, `second` does everything else. They may be one."""

    def __init__(self, model: str, setting: str, options: argparse.Namespace) -> None:
        self.model, self.setting, self.options = model, setting, options

    async def start(self) -> None:
        if self.setting == "two":
            self.first, self.second = await self._engine(1, "producer"), await self._engine(1, "consumer")
        else:
            self.first = self.second = await self._engine(2, None)

    async def _engine(self, threads: int, role: str | None) -> AsyncEngine:
        options, chunks = self.options, self.setting == "one, chunks"
        tokens = options.streams * (SHORT_PROMPT + options.output + BLOCK) + 4 * (options.prompt + BLOCK)
        blocks = 4 * (options.prompt // BLOCK) * options.bytes_of_block
        params = TrtGptModelOptionalParams(
            device="cpu", dtype=options.dtype, load_format="dummy", num_threads=threads,
            max_batch_size=options.streams + 4, max_num_tokens=options.chunk if chunks else options.prompt + BLOCK,
            enable_chunked_context=chunks, max_seq_len=options.prompt + options.output + BLOCK,
            flush_stats_when_idle=True,
            kv_transfer_config=None if role is None else KvTransferConfig(role=role, load_timeout_s=60),
            kv_cache_config=KvCacheConfig(enable_block_reuse=True, tokens_per_block=BLOCK, max_tokens=tokens,
                                          host_cache_size=0 if role is None else blocks))
        return await AsyncEngine.start(self.model, process=True, return_batch_manager_stats_cb=self._note,
                                       optional_params=params)

    def _note(self, record: str) -> None:
        figures = json.loads(record)
        self.figures = {name: figures[name] for name in ("KV Transfer Bytes", "KV Transfer Fallbacks")
                        if name in figures}

    async def first_token_s(self, prompt: list[int], count: int = OUTPUT_OF_LONG) -> float:
        """Answer a long prompt. Returns the seconds until its first token."""
        request, options, began = {"input_ids": prompt, "request_output_len": count}, {}, perf_counter()
        if self.setting == "two":
            context = await self.first.generate(request, request_type="context_only")
            request["context_phase_params"] = context.context_phase_params.to_array()
            options["request_type"] = "generation_only"
        stream = self.second.stream(request, **options)
        await anext(stream)
        took = perf_counter() - began
        async for _ in stream:
            continue
        return took

    async def gaps_s(self, prompt: list[int], count: int) -> list[float]:
        """Generate `count` tokens. Returns the seconds before each token but the first; tokens may come together."""
        times: list[float] = []
        async for delta in self.second.stream({"input_ids": prompt, "request_output_len": count}):
            times += [perf_counter()] * len(delta.tokens)
        return [after - before for before, after in zip(times, times[1:])]

    async def close(self) -> None:
        for engine in {self.first, self.second}:
            await engine.close(drain=False)


async def round_of(engines: Engines, options: argparse.Namespace, rng: np.random.Generator) -> dict[str, list[float]]:
    def prompt(count: int) -> list[int]:
        return rng.integers(1, options.vocabulary, count).tolist()

    running = [asyncio.ensure_future(engines.gaps_s(prompt(SHORT_PROMPT), options.output))
               for _ in range(options.streams)]
    arriving = []
    for _ in range(options.arrivals):
        await asyncio.sleep(options.every)
        arriving.append(asyncio.ensure_future(engines.first_token_s(prompt(options.prompt))))
    first = list(await asyncio.gather(*arriving))
    is_over = sum(task.done() for task in running)
    gaps = [gap for task in running for gap in await task]
    return {"gaps": gaps, "first": first, "ended_early": [is_over]}


async def measure(model: str, options: argparse.Namespace) -> list[dict]:
    rng, results = np.random.default_rng(0), {name: {"gaps": [], "first": [], "ended_early": []} for name in SETTINGS}
    engines = {name: Engines(model, name, options) for name in SETTINGS}
    moved = {}
    try:
        for each in engines.values():
            await each.start()
            await each.first_token_s(rng.integers(1, options.vocabulary, options.prompt).tolist(), 2)     # compiles
        for _ in range(options.rounds):
            for name, each in engines.items():
                for kind, values in (await asyncio.wait_for(round_of(each, options, rng), LONGEST_WAIT_S)).items():
                    results[name][kind] += values
        moved = engines["two"].figures
    finally:
        for each in engines.values():
            await each.close()
    prompts = options.rounds * options.arrivals + 1
    return [{"setting": name, "tokens": len(found["gaps"]), "prompts": len(found["first"]),
             "streams_over_before_the_last_prompt": sum(found["ended_early"]),
             "between_ms": _percentiles(found["gaps"]), "first_ms": _percentiles(found["first"]),
             **({} if name != "two" else {"bytes_of_a_prompt": moved["KV Transfer Bytes"] // prompts,
                                          "fallbacks": moved["KV Transfer Fallbacks"]})}
            for name, found in results.items()]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: 1000 * float(np.percentile(seconds, share)) for name, share in PERCENTILES.items()}


def table(results: Sequence[dict]) -> str:
    names = ", ".join(PERCENTILES)
    lines = [f"| engines | ms between tokens: {names} | ms to a long prompt's first: {names} |", "|---|---|---|"]
    lines += [f"| {row['setting']} | {', '.join(f'{each:.0f}' for each in row['between_ms'].values())} "
              f"| {', '.join(f'{each:.0f}' for each in row['first_ms'].values())} |" for row in results]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.two_engines", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="135M", help="sizes of the model (135M)")
    add("--dtype", default="bfloat16", help="(bfloat16)")
    add("--prompt", type=at_least(BLOCK + 1), default=1024, help="tokens of a long prompt (1024)")
    add("--chunk", type=at_least(BLOCK), default=256, help="tokens of a step with chunks (256)")
    add("--streams", type=at_least(1), default=4, help="running requests (4)")
    add("--output", type=at_least(2), default=400, help="tokens of each running request (400)")
    add("--arrivals", type=at_least(1), default=6, help="long prompts of a round (6)")
    add("--every", type=float, default=2.0, help="seconds between two long prompts (2)")
    add("--rounds", type=at_least(1), default=3, help="rounds (3)")
    add("--tiny", action="store_true", help="a small model instead of the shape, for the test")
    options = parser.parse_args(argv)
    shape = {**SHAPES[options.shape], **({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                                          "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 512}
                                         if options.tiny else {})}
    options.vocabulary = shape["vocab_size"]
    options.bytes_of_block = 4 * 2 * BLOCK * shape["num_hidden_layers"] * shape["num_key_value_heads"] * (
        shape["hidden_size"] // shape["num_attention_heads"])
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
                  **shape}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        results = asyncio.run(measure(folder, options))
    print(table(results))
    print(json.dumps({"tool": "two_engines", "python": platform.python_version(), "torch": torch.__version__,
                      "settings": vars(options), "results": results}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
