"""Damaged GGUF files, or adapter folders: each is refused with one ModelLoadError that names it, or read as its oracle
reads it.

    python tests/campaigns/damaged_files.py gguf --first-seed 100000 --files 200000 [--processes 2]

Reading a file must not start a process, import a module or open another file, and must not take a second or 64 MiB more
than its own size. A failure prints the command that repeats it. Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.checkpoints.cases import ADAPTER, GGUF
from tests.checkpoints.replay import command
from tests.checkpoints.trial import Bench, Counts

A_PORTION = 1000
IN_MEMORY = Path("/dev/shm")
_benches: list[Bench] = []


def portion(folder: str, kind: str, first_seed: int, files: int) -> Counts:
    if not _benches:
        _benches.append(Bench(Path(folder) / str(os.getpid())))
    return _benches[0].run([f"{kind}{first_seed + number}" for number in range(files)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[GGUF.strip("-"), ADAPTER.strip("-")])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began, counts = time.monotonic(), Counts()
    end = options.first_seed + options.files
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder, \
            multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        where = str(Path(folder).resolve())
        work = [(where, f"{options.kind}-", seed, min(A_PORTION, end - seed))
                for seed in range(options.first_seed, end, A_PORTION)]
        for done in pool.starmap(portion, work, chunksize=1):
            counts.add(done)
    for key, found in counts.failed[:20]:
        print(f"{key} ({command(key)}): {'; '.join(found)}")
    print(f"seeds {options.first_seed}..{end - 1}: {counts.files:,} files: {counts.ends['good']:,} read, "
          f"{counts.ends['bad']:,} refused, {len(counts.failed)} wrong; {time.monotonic() - began:.0f} s")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
