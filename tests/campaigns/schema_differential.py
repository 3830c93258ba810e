"""Compares the engine's records with a model of the schema's rules, for random records, in parallel processes.

    python tests/campaigns/schema_differential.py --first-seed 0 --cases 8000 --processes 2

Runs `--cases` seeds of each kind. Prints the number of compared and of different cases of each kind, and the smallest
record of the first difference. The exit status is 1 if anything differed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.conformance import adapter  # noqa: E402
from tests.conformance.schema_cases import KINDS, make_case  # noqa: E402
from tests.conformance.schema_compare import NotCompared, differences, shrink  # noqa: E402


def run(kind: str, first: int, count: int) -> tuple[Counter, str | None]:
    counts, example = Counter(), None
    for seed in range(first, first + count):
        case = make_case(kind, seed)
        try:
            found = differences(adapter, case)
        except NotCompared as reason:
            counts[f"not compared: {reason}"] += 1
            continue
        except Exception as error:
            found = [repr(error)]
        counts["differed" if found else "agreed"] += 1
        if found and example is None:
            example = f"{kind} {seed}: {found[0]}\n{json.dumps(shrink(adapter, case))}"
    return counts, example


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=8000, help="seeds of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()

    total, started = Counter(), time.monotonic()
    part = 200
    with ProcessPoolExecutor(options.processes) as executor:
        for kind in options.kinds:
            last = options.first_seed + options.cases
            jobs = [executor.submit(run, kind, first, min(part, last - first))
                    for first in range(options.first_seed, last, part)]
            results = [job.result() for job in jobs]
            counts = sum((counts for counts, _ in results), Counter())
            example = next((example for _, example in results if example), None)
            print(kind, dict(counts), f"{time.monotonic() - started:.0f} s", flush=True)
            if example:
                print(example)
            total += counts
    print("all", dict(total))
    return 1 if total["differed"] else 0


if __name__ == "__main__":
    sys.exit(main())
