"""Random models, random requests, random circumstances: is every outcome bit by bit the one alone?

    python tests/campaigns/deterministic.py --first-seed 0 --seconds 600
    python tests/campaigns/deterministic.py --seconds 60 --normal        without the mode: it must find something

Each seed takes a family, a dtype, a block size, a number of threads and now and then a window with sinks, and runs
some batches of random requests under random circumstances; a pair is a request alone and in a batch. What was run is
recorded in tests/CAMPAIGNS.md.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")     # threads that wait sleep: on busy cores spinning takes minutes
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.deterministic import differential

RUNS = 4


def run_seed(seed: int, parent: Path, deterministic: bool) -> Counter:
    """Run one engine's batches; say what differed, and count."""
    draw, counts = random.Random(seed), Counter(engines=1)
    family, block = draw.choice(differential.FAMILIES), draw.choice([8, 16, 32, 64, 128])
    window = draw.choice([None, None, None, {"max_attention_window": draw.randint(9, 120)}])
    if window and draw.random() < 0.5:
        window["sink_token_length"] = draw.randint(1, 80)
    options = {"dtype": draw.choice(["float32", "float32", "bfloat16", "float16"]), "tokens_per_block": block,
               "num_threads": draw.choice([1, 1, 1, 1, 1, 1, 1, 2]), "kv_cache_options": window}
    lab = differential.Laboratory(differential.make_checkpoint(family, parent), deterministic=deterministic, **options)
    for run in range(RUNS):
        asks = {number: differential.draw_ask(draw, differential.vocab_of(family), block, draw.choice([40, 130, 300]))
                for number in range(1, draw.choice([3, 8, 16]))}
        circumstances = differential.draw_circumstances(draw, asks, block)
        found = lab.differences(asks, circumstances)
        counts.update(pairs=len(asks), tokens=sum(ask.count for ask in asks.values()), different=len(found))
        if found and deterministic:
            print(f"seed {seed}, run {run}, {family}, {options}, {circumstances}: {found}", flush=True)
    counts["pauses"] = lab.num_pauses
    lab.close()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--normal", action="store_true", help="without the mode")
    options = parser.parse_args()
    total, seed, started = Counter(), options.first_seed, time.monotonic()
    with tempfile.TemporaryDirectory() as parent:
        while time.monotonic() - started < options.seconds:
            total += run_seed(seed, Path(parent), not options.normal)
            seed += 1
    print(f"seeds {options.first_seed}..{seed - 1}, {time.monotonic() - started:.0f} s: " +
          ", ".join(f"{total[name]:,} {name}" for name in ("engines", "pairs", "tokens", "pauses", "different")))
    return int(bool(total["different"]) != options.normal)


if __name__ == "__main__":
    sys.exit(main())
