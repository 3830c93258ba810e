"""T21: requests of forty adapters and of none, in caches for five of them, through managers with each family and form.

    python -m tests.campaigns.adapters SEED      repeats one seed and prints each difference

A seed is a family, forty adapters made by peft, and 200 requests. They run in each form of a step with random options:
pauses, chunks, overlap, block reuse, arrivals. The tokens of each are compared with those of the request alone, and the
greedy ones with those of transformers with the adapter of peft; see tests/harness/adapter_mixture.py.
"""

import contextlib
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")     # waiting threads sleep; spinning takes minutes on busy cores

from .portions import run_seeds
from .registry import Options, Summary

ENOUGH = {"Q": 1_000, "F": 20_000, "C": 200_000}            # requests beside others
FORMS = ("packed", "compiled", "fixed", "graph")            # the last two with an attention in torch, without kernels


def draw_options(draw: random.Random) -> dict:
    from batch_manager import KvCacheConfig, SchedulerPolicy
    from tests.harness.adapter_mixture import BLOCK

    pauses = draw.random() < 0.5
    options = {
        "policy": SchedulerPolicy.MAX_UTILIZATION if pauses else SchedulerPolicy.GUARANTEED_NO_EVICT,
        "enable_trt_overlap": draw.random() < 0.3, "max_batch_size": draw.choice([3, 8, 32]),
        "kv_cache_config": KvCacheConfig(tokens_per_block=BLOCK, max_tokens=draw.randint(8, 20) * BLOCK,
                                         enable_block_reuse=draw.random() < 0.7)}
    if draw.random() < 0.6:
        options |= {"max_num_tokens": draw.choice([16, 24, 64]), "enable_chunked_context": True}
    return options


def run_seed(seed: int, parent: Path) -> tuple[Counter, list[str]]:
    """Run one seed. Returns (counts, a line for each run with differences)."""
    import torch

    from tests.harness.adapter_mixture import Mixture
    from tests.models.conftest import make_reference
    from tests.models.test_same_logits_as_transformers import FAMILIES
    from tests.runtime.bindable_torch import BindableTorchAttention, calling_graphs

    torch.set_num_threads(1)
    draw, counts, found = random.Random(seed), Counter(), []
    case = list(FAMILIES)[seed % len(FAMILIES)]
    family, config = FAMILIES[case]
    model = make_reference(family, **config)
    model.save_pretrained(parent)
    mixture = Mixture(model, parent, seed)
    alone = mixture.run_alone()
    bound = {"parts": {"attention": BindableTorchAttention}}
    of_forms = {"packed": {"cpu_compile": False}, "compiled": {}, "fixed": bound, "graph": bound}
    for form in FORMS:
        options, of_form = draw_options(draw), of_forms[form]
        where = f"seed {seed} (python -m tests.campaigns.adapters {seed}): {case}, {form}, {options}"
        try:
            with calling_graphs() if form == "graph" else contextlib.nullcontext():
                tokens, records = mixture.run(arrivals=draw, **options, **of_form)
        except Exception as error:
            found.append(f"{where}: {type(error).__name__}: {error}")
            continue
        different, ties = mixture.different(tokens, alone)
        from_peft, ties_of_peft, compared = mixture.different_from_peft(tokens)
        steps = records[-1].get(f"{form.capitalize()} Steps", 0)
        counts.update({
            "requests": len(tokens), "compared with peft": compared, "ties": ties + ties_of_peft,
            "evictions": records[-1]["LoRA Evictions"], "pauses": sum(record["Paused Requests"] for record in records),
            f"{form} steps": steps, "different": len(different) + len(from_peft)})
        if different or from_peft or not steps:
            found.append(f"{where}: differ from alone: {different}, from peft: {from_peft}; {steps} steps in the form")
    counts["families"] = 1
    return counts, found


def run(options: Options) -> Summary:
    total, failures, last_seed = run_seeds(run_seed, options, lambda total: total["requests"] >= ENOUGH[options.tier])
    short = [] if total["requests"] >= ENOUGH[options.tier] else [
        f"{total['requests']:,} of {ENOUGH[options.tier]:,} requests"]
    return Summary(f"T21: seeds {options.first_seed}..{last_seed}: " + ", ".join(
        f"{count:,} {name}" for name, count in total.items()), failures, short)


def main() -> int:
    with tempfile.TemporaryDirectory() as parent:
        counts, found = run_seed(int(sys.argv[1]), Path(parent))
    print(*found, ", ".join(f"{count:,} {name}" for name, count in counts.items()), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
