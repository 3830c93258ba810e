"""Random requests through the whole loop: the checks of tests/property/test_loop.py with more seeds.

    python tests/campaigns/random_streams.py --first-seed 0 --seconds 300

Prints counts of events and each seed that failed. Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harness.world import build_world
from tests.property.test_loop import Stream


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    logging.getLogger("batch_manager").setLevel(logging.CRITICAL)    # thousands of injected faults are logged

    seen, wrong, seed, began = Counter(), [], options.first_seed, time.monotonic()
    while time.monotonic() - began < options.seconds:
        stream = Stream(seed, build_world)
        try:
            stream.run()
        except Exception as error:
            wrong.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        seen += stream.seen
        seen["requests"] += len(stream.requests)
        seed += 1
    print(f"seeds {options.first_seed}..{seed - 1}: {seed - options.first_seed} streams, {len(wrong)} wrong")
    print(", ".join(f"{count:,} {what}" for what, count in sorted(seen.items())))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
