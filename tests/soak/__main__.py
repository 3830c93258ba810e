"""One soak in a process of its own.

    python -m tests.soak --seed 1 --items 20000 --items-a-round 250 [--out FILE] [--tier Q]

One JSON object for every idle point goes to FILE; then a verdict is printed. Exit status 1: something is wrong, or
grows. The C library keeps caches of freed pieces for every thread; they fill slowly, to a bound, and would look like
growth. So does what many arenas keep of what was freed. The process starts itself again without either.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from .soak import Sample, soak
from .verdict import BOUNDS, judge, table

PLAIN_ALLOCATOR = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--items-a-round", type=int, default=250)
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tier", choices=sorted(BOUNDS), default="Q", help="how much growth is too much (Q)")
    options = parser.parse_args()
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "tests.soak", *sys.argv[1:]],
                  {**os.environ, "GLIBC_TUNABLES": PLAIN_ALLOCATOR})

    with tempfile.TemporaryDirectory() as folder:
        path = options.out or Path(folder) / "samples"
        with path.open("w") as out:
            def tell(sample: Sample) -> None:           # kept in a file: a list of them would be growth
                out.write(json.dumps(sample) + "\n")
                out.flush()

            soak(options.seed, options.items, options.items_a_round, tell, seconds=options.seconds)
        verdict = judge([json.loads(line) for line in path.read_text().splitlines()], BOUNDS[options.tier])
    print(table(verdict))
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
