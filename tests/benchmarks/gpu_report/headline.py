"""Goal G6: tokens/s of 256 simultaneous requests of very different lengths.

The workload is that of nano-vllm's and mini-sglang's benchmark: 142,827 prompt and 133,966 output tokens, at
temperature 0.6, without an end id.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from batch_manager.tools.bench.request_options import RequestOptions

from .bench import Bench
from .engines import engine
from .records import Record
from .shapes import QWEN3_600M, TINY, Shape

COUNT, SHORTEST, LONGEST, LARGEST_TOKEN, TEMPERATURE = 256, 100, 1024, 10_000, 0.6
WORKLOAD = "headline.json"                      # name of the workload in the results of other engines
LOAD_SECONDS, EAGER_LOAD_SECONDS, RUN_SECONDS = 18, 10, 8               # estimates
GOOD_RATES = {"H100": 18_500.0, "H200": 26_000.0}       # output tokens/s
STRETCH = 0.75                                  # of the shortest possible time; better than the goal G6-share


def run(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    """Yield the records of G6, of G6-share, and of G6-peer for each result of another engine.

    graphs   use CUDA graphs
    """
    runs = 2 if graphs else 1
    bench.require((LOAD_SECONDS if graphs else EAGER_LOAD_SECONDS) + runs * RUN_SECONDS)
    workload = dry_workload() if bench.is_dry else headline_workload()
    requests = workload["requests"]
    with engine(bench, QWEN3_600M, max_batch=COUNT, graphs=graphs) as made:
        seconds = [made.serve(requests, options=RequestOptions(temperature=TEMPERATURE)).seconds
                   for _ in range(bench.pick(runs, 1))]
    tokens, spread = workload["output_tokens"], max(seconds) / min(seconds) - 1 if len(seconds) > 1 else None
    rate, case = tokens / min(seconds), f"{made.label}, {COUNT} requests"
    least = least_seconds(bench, made.shape, [(len(one["prompt"]), one["max_tokens"]) for one in requests])
    share = least / min(seconds)
    figures = f"{tokens:,} tokens in {min(seconds):.2f} s, {share:.2f} of the shortest possible time"
    card = re.search(r"\bH[12]00\b", bench.clock.name)
    yield Record("G6", case, rate, GOOD_RATES[card[0]] if card else None, "tokens/s", spread, note=made.note,
                 figures=figures)
    yield Record("G6-share", case, least, min(seconds), "s", spread, note=made.note,
                 figures=f"the stretch goal of {STRETCH} is {'met' if share >= STRETCH else 'not met'}")
    for name, theirs in peer_results(bench.peers, workload):
        yield Record("G6-peer", f"{case}, against {name}", rate, theirs, "tokens/s", spread, note=made.note)


def headline_workload(shape: Shape = QWEN3_600M, count: int = COUNT, shortest: int = SHORTEST,
                      longest: int = LONGEST) -> dict[str, Any]:
    """Return the workload in the form of batch_manager.tools.workload. All requests arrive at once.

    Prompts, and then output lengths, are drawn in the order in which nano-vllm's bench.py draws them.
    """
    random = Random(0)
    prompts = [[random.randint(0, LARGEST_TOKEN) % shape.vocabulary for _ in range(random.randint(shortest, longest))]
               for _ in range(count)]
    requests = [{"id": number, "arrival_s": 0.0, "max_tokens": random.randint(shortest, longest), "prompt": prompt}
                for number, prompt in enumerate(prompts)]
    return {"seed": 0, "vocab": shape.vocabulary, "mode": "offline", "rate": 0.0, "n": count,
            "prompt_tokens": sum(map(len, prompts)), "output_tokens": sum(one["max_tokens"] for one in requests),
            "requests": requests}


def dry_workload() -> dict[str, Any]:
    return headline_workload(TINY, 2, 3, 5)


def least_seconds(bench: Bench, shape: Shape, lengths: Sequence[tuple[int, int]]) -> float:
    """Return a lower bound for the seconds that serving requests of these (prompt, output) lengths takes in bfloat16.

    The bound is at the measured rates of this GPU: the operations of the prompts in the layers, the reading of keys and
    values, and in each of as many steps as the longest output has, the weight matrices as in
    `Shape.least_step_seconds`. The first token of an output is computed with the prompt.
    """
    prompts, outputs = np.array(lengths, np.int64).T
    rows = (outputs[None] > np.arange(1, outputs.max())[:, None]).sum(1)
    matrices = sum(shape.least_matrix_seconds(bench, int(batch)) for batch in rows)
    keys = int(((outputs - 1) * prompts + (outputs - 1) * outputs // 2).sum())
    of_prompts = 2 * (shape.matrix_entries - shape.vocabulary * shape.hidden) * int(prompts.sum())
    return matrices + keys * shape.kv_bytes_per_token / bench.copy_bytes_s + of_prompts / bench.matmul_flop_s


def peer_results(folder: Path | None, workload: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, output tokens/s) of each result for this workload in `folder`, which has results of other engines.

    The results are in the format of batch_manager.tools.bench, and must have been measured on the same device.
    """
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        result = json.loads(path.read_text())
        if isinstance(result, dict) and result.get("workload") == WORKLOAD and not result.get("wrong_length") and all(
                result.get(name) == workload[name] for name in ("n", "prompt_tokens", "output_tokens")):
            yield f"{result['peer']} {result.get('variant', '')}".strip(), float(result["output_tok_s"])
