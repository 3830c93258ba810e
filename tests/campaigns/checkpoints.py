"""T6: reads damaged checkpoints in several processes.

The suite first reads all truncated checkpoints, and then checkpoints with the damage of consecutive seeds. If
--first-seed is not 0, it runs seeds only.
"""

import os
import tempfile
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.checkpoints.cases import CUT, num_cuts
from tests.checkpoints.replay import command
from tests.checkpoints.trial import Bench, Counts

from .portions import each_done
from .registry import Options, Summary

ENOUGH = {"Q": 20_000, "F": 1_000_000, "C": 50_000_000}     # files
A_PORTION = 1000
IN_MEMORY = Path("/dev/shm")


@cache
def bench(folder: Path) -> Bench:
    return Bench(folder / str(os.getpid()))


def portion(folder: Path, keys: list[str]) -> Counts:
    """Load the damaged checkpoints that `keys` names, in this process' part of `folder`. Returns the counts."""
    return bench(folder).run(keys)


def run(options: Options) -> Summary:
    os.environ["OMP_NUM_THREADS"] = "1"                      # for the processes to come
    counts, next_seed = Counts(), options.first_seed
    cuts = deque(() if next_seed else [f"{CUT}{number}" for number in range(num_cuts())])
    num_truncations = len(cuts)

    def portions(folder: Path) -> Iterator[tuple[Path, list[str]]]:
        nonlocal next_seed
        submitted = 0
        while submitted < ENOUGH[options.tier]:
            keys = [cuts.popleft() for _ in range(min(A_PORTION, len(cuts)))]
            if not keys:
                keys = [str(next_seed + number) for number in range(A_PORTION)]
                next_seed += A_PORTION
            submitted += len(keys)
            yield folder, keys

    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        for _, done in each_done(portion, portions(Path(folder).resolve()), options):
            counts.add(done)
    failures = [f"{key} ({command(key)}): {'; '.join(wrong)}" for key, wrong in counts.failed]
    missing = ENOUGH[options.tier] - counts.files
    return Summary(
        f"T6: seeds {options.first_seed}..{next_seed - 1} and {num_truncations - len(cuts):,} truncations: "
        f"{counts.files:,} checkpoints, {counts.whole:,} through the whole constructor; {counts.ends['good']:,} were "
        f"right, {counts.ends['bad']:,} wrong and refused, of {counts.ends['undecided']:,} the rules cannot tell",
        failures, [f"{counts.files:,} of {ENOUGH[options.tier]:,} files"] if missing > 0 else [])
