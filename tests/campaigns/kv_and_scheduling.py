"""Scheduling and KV cache with all features together, for consecutive seeds.

    python tests/campaigns/kv_and_scheduling.py --first-seed 0 --seconds 600

The runs and their checks are in tests/property/. A seed that fails is shrunk and printed. Results are recorded in
tests/CAMPAIGNS.md.
"""

import argparse
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.property.runs import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()

    end, counts = time.monotonic() + options.seconds, Counter(wrong=0)
    for seed in count(options.first_seed):
        if time.monotonic() > end:
            break
        counts["seeds"] += 1
        try:
            counts.update(run_seed(seed))
        except AssertionError as error:
            counts["wrong"] += 1
            print(error, flush=True)
    print(f"seeds {options.first_seed}..{options.first_seed + counts['seeds'] - 1}: "
          + ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items())))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
