"""T25: prompt caches on disk whose directory was damaged, and ones that are filled far beyond their limit.

    python -m tests.campaigns --tier F --suite T25 --seconds 280

Damaged: blocks are saved, then files and folders are torn, flipped, swapped, renamed, replaced by links and pipes, or
removed. What a new process loads must be what was saved, no load may raise, and the damaged blocks can be saved again.
Filled: two processes save blocks in turns; the files never have more bytes than the limit and the share that a process
saves without a look.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from batch_manager import StoredBlock
from batch_manager.stores.directory import UNSEEN, DirectoryStore
from tests.stores.test_directory import MUTATIONS, NUM_BYTES, chain, files, load, opened, save

from .portions import run_seeds
from .registry import Options, Summary

DIRECTORIES = {"Q": 1_000, "F": 100_000, "C": 1_000_000}
SAVES = {"Q": 10_000, "F": 1_000_000, "C": 10_000_000}
SAVES_OF_A_SEED, BLOCKS_OF_THE_LIMIT, FOLDERS = 10_000, 256, 8
IN_MEMORY = Path("/dev/shm")
MEMORY = IN_MEMORY if IN_MEMORY.is_dir() else None


def damage_file(draw: Random, path: Path, other: Path) -> str:
    kind = draw.choice([*MUTATIONS, "gone", "swapped", "renamed", "link", "dangling", "pipe", "folder"])
    if kind in MUTATIONS:
        path.write_bytes(MUTATIONS[kind](path.read_bytes() or b"-", draw, other.read_bytes()))
    elif kind == "swapped" and other != path:
        between = path.with_name("between")
        os.rename(path, between)
        os.rename(other, path)
        os.rename(between, other)
    elif kind == "renamed":
        name = draw.randbytes(32).hex()
        target = path.parents[1] / name[:2] / f"{name[2:]}.kv"
        if not target.parent.is_symlink() and not target.parent.is_file():     # an earlier damage
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
    else:
        path.unlink()
        if kind in ("link", "dangling"):
            path.symlink_to(other if kind == "link" else "missing")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            (path / "below").mkdir(parents=True)
    return kind


def damage_folder(draw: Random, root: Path) -> str:
    kind = draw.choice(["gone", "file", "link", "junk", "many names", "temporary", "lock"])
    folders = [path for path in root.iterdir() if len(path.name) == 2 and path.is_dir() and not path.is_symlink()]
    if not folders:
        return "folder: none"
    folder = draw.choice(folders)
    if kind in ("gone", "file", "link"):
        elsewhere = root / f"elsewhere {folder.name}"
        os.rename(folder, elsewhere)
        if kind == "file":
            folder.write_text("")
        elif kind == "link":
            folder.symlink_to(elsewhere.name)
    elif kind == "junk":
        (folder / ("x" * draw.randrange(1, 200) + ".kv")).write_bytes(draw.randbytes(9))
    elif kind == "many names":
        for name in ("zz", "AB", "..kv", "a", "é"):
            (root / name).write_text("")
    elif kind == "temporary":
        (root / f"tmp-{draw.randrange(99)}").mkdir(exist_ok=True)
    else:
        (root / "lock").mkdir(exist_ok=True)
    return f"folder: {kind}"


def damaged(seed: int, parent: Path) -> tuple[Counter[str], list[str]]:
    """Damage one directory. Returns what was done, and what was wrong."""
    draw, counts = Random(f"damaged {seed}"), Counter(directories=1)
    chains = [chain(draw.randrange(2, 6), root=bytes([number]) * 32, extra=(1, 2, 3, 4) if number else None)
              for number in range(2)]
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        root = Path(name)
        for blocks in chains:
            save(opened(root), blocks)
        try:
            for _ in range(draw.randrange(1, 4)):
                found = [path for path in files(root) if path.is_file() and not path.is_symlink()]
                is_file = found and draw.random() < 0.8
                counts[damage_file(draw, draw.choice(found), draw.choice(found)) if is_file
                       else damage_folder(draw, root)] += 1
            fresh = opened(root, read_only=draw.random() < 0.2, timestamp=lambda: draw.uniform(-1e9, 4e9))
            for blocks in chains:
                counts["loaded"] += load(fresh, blocks)          # compares each byte
            for blocks in chains:
                try:
                    save(fresh, blocks)
                except OSError:
                    counts["refused saves"] += 1
                else:
                    if not fresh._read_only:
                        counts["saved again"] += 1
                        if (again := load(fresh, blocks)) < len(blocks):
                            load(fresh, blocks)                  # what was no file made way
                            save(fresh, blocks)
                            again = load(fresh, blocks)
                        assert again == len(blocks), f"{again} of {len(blocks)} blocks after a second save"
        except Exception as error:
            return counts, [f"damaged seed {seed}: {type(error).__name__}: {error}"]
    return counts, []


def filled(seed: int, parent: Path) -> tuple[Counter[str], list[str]]:
    draw, now, most = Random(f"filled {seed}"), [1e9], 0
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        root = Path(name)

        def block(number: int) -> StoredBlock:
            key = bytes([number % FOLDERS]) + number.to_bytes(31, "big")
            return StoredBlock(key, bytes(32), (number, 1, 2, 3), None)

        probe = opened(root)
        save(probe, [block(0)])
        size = files(root)[0].stat().st_size
        limit = BLOCKS_OF_THE_LIMIT * size
        both = [DirectoryStore(str(root), limit, timestamp=lambda: now[0]) for _ in range(2)]
        may_have = limit + len(both) * (UNSEEN * limit + size)
        for number in range(1, SAVES_OF_A_SEED + 1):
            now[0] += draw.choice([1.0, 60.0, 5000.0, -3000.0])
            process = both[draw.random() < 0.3]
            save(process, [block(number)])
            if number % 64 == 0:
                total = sum(entry.stat().st_size for folder in root.iterdir() if folder.is_dir()
                            for entry in os.scandir(folder))
                most = max(most, total)
                if total > may_have:
                    return Counter(), [f"filled seed {seed}: {total:,} bytes of {limit:,} after {number} saves"]
            if number % 50 == 0:
                load(process, [block(number)])
        kept = len(files(root))
    wrong = [] if kept > 0.8 * BLOCKS_OF_THE_LIMIT else [f"filled seed {seed}: only {kept} blocks are left"]
    return Counter(saves=SAVES_OF_A_SEED, above=most > limit, kept=kept), wrong


def run(options: Options) -> Summary:
    began = options.seconds
    half = options if began is None else Options(options.tier, options.first_seed, began / 2, options.jobs)
    directories, saves = DIRECTORIES[options.tier], SAVES[options.tier]
    first = run_seeds(damaged, half, lambda counts: counts["directories"] >= directories, 200)
    second = run_seeds(filled, half, lambda counts: counts["saves"] >= saves)
    kinds = {name: count for name, count in first.counts.items() if name not in ("directories", "loaded")}
    short = [f"{done:,} of {wanted:,} {name}" for name, done, wanted in (
        ("directories", first.counts["directories"], directories), ("saves", second.counts["saves"], saves))
        if done < wanted]
    return Summary(
        f"T25: seeds {options.first_seed}..{first.last_seed}: {first.counts['directories']:,} damaged directories, "
        f"{first.counts['loaded']:,} blocks loaded; seeds {options.first_seed}..{second.last_seed}: "
        f"{second.counts['saves']:,} saves into directories of {BLOCKS_OF_THE_LIMIT} blocks of {NUM_BYTES} bytes, "
        f"{second.counts['above']} of them ever above the limit",
        [*first.failures, *second.failures], short, [f"{name}: {count:,}" for name, count in sorted(kinds.items())])
