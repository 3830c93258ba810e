"""T5: fuzzed requests, in several processes. A block is BLOCK requests that one engine runs; see tests/fuzzing."""

import gc
import resource
import time
from collections import Counter, deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from faulthandler import cancel_dump_traceback_later, dump_traceback_later
from multiprocessing import get_context

from tests.fuzzing.block import BLOCK, run_block
from tests.fuzzing.engines import CYCLE
from tests.fuzzing.replay import command, report
from tests.harness.world import quiet_log

from .registry import Options, Summary

ENOUGH = {"Q": 21_600, "F": 1_000_000, "C": 100_000_000}        # requests
BLOCKS_A_PORTION = 16
SECONDS_UNTIL_A_PORTION_HANGS = 600.0
REPORTS = 5


@dataclass(slots=True)
class Counts:
    """Sums over blocks of requests. `failed` has (block number, report) of each block with a violation."""

    blocks: int = 0
    requests: int = 0
    run: int = 0
    not_built: int = 0
    nobody: int = 0
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)
    slowest: float = 0.0
    largest: float = 0.0
    resident_bytes: int = 0

    def add(self, other: "Counts") -> None:
        for name in ("blocks", "requests", "run", "not_built", "nobody", "tokens", "refused", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("slowest", "largest", "resident_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


def run_blocks(first_block: int, count: int) -> Counts:
    """Run `count` blocks of requests in this process, from the block `first_block` on."""
    counts = Counts()
    gc.collect()
    gc.freeze()                         # garbage collection then visits new objects only
    with quiet_log():
        for block in range(first_block, first_block + count):
            outcome = run_block(block)
            counts.add(Counts(1, outcome.requests, outcome.run, outcome.not_built, outcome.nobody, outcome.tokens,
                              Counter(outcome.refused), slowest=outcome.slowest, largest=outcome.largest))
            if outcome.wrong:
                counts.failed.append((block, report(block, outcome.wrong)))
    gc.unfreeze()
    counts.resident_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return counts


def portion(first_block: int, count: int) -> Counts:
    """Run `count` blocks from `first_block` on. If they hang, the process prints its threads' stacks and ends."""
    dump_traceback_later(SECONDS_UNTIL_A_PORTION_HANGS, exit=True)
    try:
        return run_blocks(first_block, count)
    finally:
        cancel_dump_traceback_later()


def fuzz(options: Options) -> Counts:
    """Run blocks from `options.first_seed` on, until the work of the tier is done or `options.seconds` have passed."""
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    counts, next_block = Counts(), options.first_seed
    running: deque[tuple[int, Future[Counts]]] = deque()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while running or next_block == options.first_seed:
            late = deadline is not None and time.monotonic() > deadline
            under_way = counts.requests + len(running) * BLOCKS_A_PORTION * BLOCK
            while len(running) < 2 * options.jobs and not late and under_way < ENOUGH[options.tier]:
                running.append((next_block, pool.submit(portion, next_block, BLOCKS_A_PORTION)))
                next_block += BLOCKS_A_PORTION
                under_way += BLOCKS_A_PORTION * BLOCK
            if not running:
                break
            first, future = running.popleft()
            try:
                counts.add(future.result())
            except BrokenProcessPool:
                blocks = [first, *(block for block, _ in running)]
                counts.failed.append((first, "a process died or hung in one of the portions that begin with the blocks "
                                      f"{blocks}, see above; again: " + " or ".join(
                                          f"python -m tests.campaigns --suite T5 --first-seed {block} --jobs 1"
                                          for block in blocks)))
                break
    return counts


def run(options: Options) -> Summary:
    counts = fuzz(options)
    refused = ", ".join(f"{count:,} {code}" for code, count in sorted(counts.refused.items()))
    failures = [text for _, text in counts.failed[:REPORTS]]
    failures += [f"block {block}: {command(block * BLOCK)}" for block, _ in counts.failed[REPORTS:]]
    short = [] if counts.requests >= ENOUGH[options.tier] else [
        f"{counts.requests:,} of {ENOUGH[options.tier]:,} requests"]
    return Summary(
        f"T5: blocks {options.first_seed}..{options.first_seed + counts.blocks - 1}: {counts.requests:,} requests to "
        f"{len(CYCLE)} engines: {counts.run:,} run ({counts.tokens:,} tokens), refused {refused}; {counts.not_built:,} "
        f"could not be built, {counts.nobody:,} had no id; the slowest took {1000 * counts.slowest:.0f} ms to read, "
        f"the largest {counts.largest:.2f} times max_request_bytes; at most {counts.resident_bytes >> 20:,} MiB "
        "resident",
        failures, short)
