"""Runs one soak in this process.

    python -m tests.soak --seed 1 --items 20000 --items-a-round 250 [--out FILE] [--tier Q]

An idle point is the end of a round, when all engines are idle. The program writes one JSON object per idle point to
FILE, then prints a verdict. The exit status is 1 if a response is wrong, or if memory, objects, threads or files grow.

The C library keeps freed memory in caches per thread and in many arenas. They fill slowly, up to a bound, which would
look like growth. The process therefore restarts itself without the caches and with one arena.
"""

import argparse
import gc
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
            def tell(sample: Sample) -> None:           # writes to a file, because a list would grow
                out.write(json.dumps(sample) + "\n")
                out.flush()

            gc.freeze()                                     # collections and counts do not visit the modules
            soak(options.seed, options.items, options.items_a_round, tell, seconds=options.seconds)
        verdict = judge([json.loads(line) for line in path.read_text().splitlines()], BOUNDS[options.tier])
    print(table(verdict))
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
