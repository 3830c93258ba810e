"""Measure what drafts do to the speed of generation on a CPU, with and without them in one engine.

    python examples/get_smollm2.py && python -m tests.benchmarks.speculation --threads 1

The prompts are in speculation_prompts.json: outputs that repeat their prompt (greedy), prompts of the same kind with
which nothing was tuned, and open ones (sampled), whose outputs hardly repeat anything; then open ones, --batch at
once. The engine answers each prompt with and without drafts in turn, so that a busy machine slows both. It is one,
because the place of the weights in memory makes one engine up to a fifth slower than the next. `speed` is the median
over the rounds of: tokens per second with drafts, relative to those without; `generation` is this without the time
that a request for one token takes. With --threads 1, times are CPU times of the process, which exclude other
processes. The tokens of both must be equal up to the first near tie; `equal` counts the outputs that are equal to
their end.
"""

import argparse
import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from batch_manager import SpeculativeConfig
from batch_manager.extras.llm import LLM
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least
from examples.get_smollm2 import smollm2_path

PROMPTS = json.loads(Path(__file__).with_name("speculation_prompts.json").read_text())
SAMPLED = {"repeats": {"temperature": 0}, "held_out": {"temperature": 0}, "open": {"temperature": 1, "seed": 1},
           "batch": {"temperature": 1, "seed": 1}}


@contextlib.contextmanager
def in_bfloat16(path: Path) -> Iterator[str]:
    """Yield a folder with the model of a .gguf file in bfloat16. Any other path is yielded as it is."""
    if path.suffix != ".gguf":
        yield str(path)
        return
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        config.pop("quantization_config", None)
        Path(folder, "config.json").write_text(json.dumps(config))
        tied = config["tie_word_embeddings"]
        save_file({name: tensor for name, tensor in model.state_dict().items()
                   if not (tied and name == "lm_head.weight")}, Path(folder, "model.safetensors"))
        del model
        yield folder


def measure(engine: LLM, kind: str, prompts: Sequence[Sequence[list]], options: argparse.Namespace,
            clock: Callable[[], float]) -> dict[str, float]:
    """Return the figures of a kind of prompts. Each element of `prompts` is answered at once."""
    seconds, first, tokens = ([[], []] for _ in range(3))
    outputs: list[list[list[int]]] = [[], []]
    for round_ in range(1 + options.rounds):                        # the first one warms up
        for index, (taken, alone, counts) in enumerate(zip(seconds, first, tokens)):
            sums = [0.0, 0.0, 0]
            for together in prompts:
                for place, most in enumerate((1, options.tokens)):
                    began = clock()
                    answers = engine.generate(together, max_tokens=most, speculation=bool(index), **SAMPLED[kind])
                    sums[place] += clock() - began
                assert not any(answer.error for answer in answers), answers
                sums[2] += sum(len(answer.tokens) for answer in answers)
                if not round_:
                    outputs[index] += [answer.tokens for answer in answers]
            if round_:
                alone.append(sums[0])
                taken.append(sums[1])
                counts.append(sums[2])
    rates = [[count / time for count, time in zip(counts, taken)] for counts, taken in zip(tokens, seconds)]
    generated = [[count / (time - one) for count, time, one in zip(counts, taken, alone)]
                 for counts, taken, alone in zip(tokens, seconds, first)]
    return {"tokens": tokens[0][0], "tokens_per_s": median(rates[0]), "with_drafts": median(rates[1]),
            "speed": median(after / before for before, after in zip(*rates)),
            "generation": median(after / before for before, after in zip(*generated)),
            "equal": sum(before == after for before, after in zip(*outputs)), "outputs": len(outputs[0])}


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.speculation", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=smollm2_path(), help="folder or .gguf file with a chat template, which is "
        "converted to bfloat16 (the file of examples/get_smollm2.py)")
    add("--tokenizer", help="folder or .gguf file with its tokenizer (the model's)")
    add("--threads", type=at_least(1), help="threads of a step (torch's setting)")
    add("--plain", action="store_true", help="prompts as plain text, for a model without a chat template")
    add("--tokens", type=at_least(2), default=96, help="most tokens of an output (96)")
    add("--rounds", type=at_least(1), default=5, help="measured rounds of each kind (5)")
    add("--batch", type=at_least(1), default=32, help="open prompts at once, after the single ones (32)")
    add("--kinds", nargs="+", choices=SAMPLED, default=[*SAMPLED], help="(all)")
    add("--dtype", default="bfloat16", help="(bfloat16)")
    add("--speculative-config", type=SpeculativeConfig.of, default=SpeculativeConfig(), metavar="JSON", help="(ngram)")
    options = parser.parse_args(argv)
    if options.model is None:
        parser.error("there is no model; run python examples/get_smollm2.py first, or name one with --model")
    clock = process_time if options.threads == 1 else perf_counter
    results = {}
    with in_bfloat16(options.model) as folder, LLM(
            folder, tokenizer=options.tokenizer or options.model, dtype=options.dtype, num_threads=options.threads,
            device="cpu", max_batch_size=options.batch, speculative_config=options.speculative_config) as engine:
        for kind in options.kinds:
            texts = [text if options.plain else [{"role": "user", "content": text}]
                     for text in PROMPTS["open" if kind == "batch" else kind]]
            prompts = [[text] for text in texts]
            if kind == "batch":
                prompts = [[texts[index % len(texts)] for index in range(options.batch)]]
            results[kind] = measure(engine, kind, prompts, options, clock)
            print(f"{kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in results[kind].items()), flush=True)
    print(json.dumps({"tool": "speculation", "model": options.model.name, "threads": options.threads,
                      "rounds": options.rounds, "dtype": options.dtype, "python": platform.python_version(),
                      "torch": torch.__version__, "load": os.getloadavg()[0], "results": results}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
