"""Random texts through TextStream, many of them: tests/extras/test_text.py with more seeds.

    python tests/campaigns/text_streams.py --first-seed 0 --texts 10000

Takes the tokenizers in turn. Prints what happened on the way, and every seed that went wrong. What was run is recorded
in tests/CAMPAIGNS.md.
"""

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.extras.text_streams import TOKENIZERS, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=10_000, help="in all, of all tokenizers")
    options = parser.parse_args()
    logging.getLogger("batch_manager").setLevel(logging.CRITICAL)    # tokenizers that cannot be cut are warned of

    seen, wrong, names = Counter(), 0, list(TOKENIZERS)
    last = options.first_seed + options.texts
    for number in range(options.first_seed, last):
        seed, name = number, names[number % len(names)]
        try:
            run(seed, name, seen)
        except Exception as error:
            wrong += 1
            print(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    print(f"seeds {options.first_seed}..{last - 1} of {len(names)} tokenizers, {wrong} wrong")
    print(", ".join(f"{count:,} {what}" for what, count in sorted(seen.items())))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
