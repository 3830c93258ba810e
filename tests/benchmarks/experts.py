"""Measure generation steps of a mixture of experts: compiled, in torch by the same classes, and in transformers.

    python -m tests.benchmarks.experts --dtype bfloat16

A Qwen3-MoE of 132M parameters with random weights, 4 of 32 experts for each token. One thread; milliseconds of
processor time, medians of steps that run in turn, with 32 cached tokens of each sequence. Prints a table in Markdown.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from batch_manager.models import load_model
from batch_manager.runtime.forms.compiled.thread_governor import ThreadGovernor
from tests.models.conftest import Driver

SIZES = {"vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "head_dim": 64,
         "num_key_value_heads": 4, "moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 4}
CACHED = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(getattr(torch, options.dtype)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = {form: load_model(folder, device="cpu", dtype=options.dtype, compiled_step=form == "compiled")
                  for form in ("compiled", "torch")}
    print("| sequences | compiled | in torch | transformers |\n|---|---|---|---|")
    for rows in (1, 8, 32):
        prompts = torch.randint(0, SIZES["vocab_size"], (rows, CACHED)).tolist()
        steps: dict[str, Callable[[list[int]], object]] = {}
        for form, one in loaded.items():
            driver = Driver(one, compiled=form == "compiled", num_blocks=400)
            if driver.compiled:
                driver.step._governor = ThreadGovernor(1)
            driver.run([(number, prompt, True) for number, prompt in enumerate(prompts)])
            steps[form] = lambda tokens, driver=driver: driver.run((), list(enumerate(tokens)))
        with torch.inference_mode():
            cache = model(torch.tensor(prompts), use_cache=True).past_key_values
        steps["transformers"] = lambda tokens, cache=cache: model(torch.tensor(tokens)[:, None], past_key_values=cache,
                                                                  use_cache=True)
        times: dict[str, list[float]] = {form: [] for form in steps}
        for number in range(options.steps):
            for form, step in steps.items():
                start = time.process_time()
                with torch.inference_mode():
                    step([5 + number * 7 + row * 13 for row in range(rows)])
                times[form].append(time.process_time() - start)
        print(f"| {rows} | " + " | ".join(f"{statistics.median(found) * 1e3:.1f}" for found in times.values()) + " |",
              flush=True)


if __name__ == "__main__":
    main()
