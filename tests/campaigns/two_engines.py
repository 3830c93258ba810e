"""T26: prompts computed in one engine and continued in another, with models of every family, against one engine.

    python -m tests.campaigns --tier F --suite T26 --seconds 280 --jobs 1
    python -m tests.campaigns.two_engines SEED      repeats one seed and prints each difference

A seed is a family and options of the engines: compiled or not, deterministic or not, chunks, drafts, a window, FP8. It
has requests with random prompts, some of which begin alike, and with the tensors of
tests/integration/test_contexts_from_another_engine.py. In a third of the seeds the first engine hands over nothing, but
saves to a directory on disk, on which the second one starts. In some seeds the first engine has a process of its own,
which is killed by SIGKILL while it saves. Texts, log-probabilities and all other tensors must be those of one engine
without chunks and drafts: bit by bit if deterministic, otherwise within 3e-4.
"""

import os
import sys
import tempfile
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")     # waiting threads sleep; spinning takes minutes on busy cores

from .portions import run_seeds
from .registry import Options, Summary

ENOUGH = {"Q": 50, "F": 1_000, "C": 10_000}                 # requests
KINDS = {"producer": "context_only", "consumer": "generation_only", None: "context_and_generation"}


def draw_engines(draw: Random) -> tuple[dict, dict, dict]:
    """Return options of all engines, and further ones of the first and of the second of the two."""
    from tests.integration import test_contexts_from_another_engine as test

    common, kv = {}, {"tokens_per_block": draw.choice([8, 16, 32])}
    if draw.random() < 0.7:
        common |= test.EXACT
    if draw.random() < 0.5:
        common |= test.IN_TORCH
    if draw.random() < 0.25:
        kv["max_attention_window"] = draw.randint(40, 90)
    if draw.random() < 0.2:
        kv["kv_cache_dtype"], common = "fp8", common | test.EXACT
    own = [{"max_batch_size": draw.choice([1, 4, 9])} for _ in range(2)]
    for options in own:
        if draw.random() < 0.5:
            options |= {"enable_chunked_context": True, "max_num_tokens": draw.choice([32, 48, 96])}
    if draw.random() < 0.6:
        own[1] |= test.DRAFTS
    return {**common, "kv": kv}, *own


def draw_asked(draw: Random) -> list[tuple[list[int], dict]]:
    """Return the prompt and the tensors of each request."""
    from tests.integration import test_contexts_from_another_engine as test

    trunk, asked = [draw.randrange(12, test.VOCABULARY) for _ in range(100)], []
    for tensors in draw.sample(test.REQUESTS, draw.randint(6, len(test.REQUESTS))):
        prompt = [*trunk[:draw.choice([0, 0, draw.randrange(100)])],
                  *[draw.randrange(12, test.VOCABULARY) for _ in range(draw.randrange(1, 120))]]
        if "random_seed" in tensors:
            tensors = {**tensors, "random_seed": draw.getrandbits(32)}
        asked.append((prompt, tensors))
    return asked


def prefill(pipe: Any, folder: Path, role: str | None, options: dict, asked: list) -> None:
    """Compute the prompts, in a process of its own, and hold them until the other engine has them."""
    from tests.integration.test_contexts_from_another_engine import Engine

    engine = Engine(folder, role, **options)
    pipe.send(engine.answer(engine.requests(asked, KINDS[role])))
    pipe.recv()
    engine.end()


def run_seed(seed: int, parent: Path) -> tuple[Counter, list[str]]:
    """Run one seed. Returns (counts, a line for each request with differences)."""
    import torch

    from tests.integration.conftest import Reference
    from tests.integration.families import FAMILIES
    from tests.integration.test_contexts_from_another_engine import Engine, differences

    torch.set_num_threads(1)
    draw, family = Random(seed), FAMILIES[seed % len(FAMILIES)]
    folder = parent / family
    if not folder.exists():
        folder.mkdir()
        Reference(family, folder)
    options, of_first, of_second = draw_engines(draw)
    asked, in_processes, has_disk = draw_asked(draw), draw.random() < 0.25, draw.random() < 1 / 3
    roles: tuple[str | None, str | None] = (None, None) if has_disk else ("producer", "consumer")
    where = (f"seed {seed} (python -m tests.campaigns.two_engines {seed}): {family}, {options}, {of_first}, "
             f"{of_second}, two processes: {in_processes}, disk: {has_disk}")
    counts = Counter({"engines": 3, "in two processes": in_processes, "requests": len(asked),
                      "deterministic": "deterministic" in options, "with a disk": has_disk})
    alone = Engine(folder, **options)
    wanted = alone.answer(alone.requests(asked))
    alone.end()
    if has_disk:
        options["kv"] |= {"disk_cache_path": parent / f"disk {seed}", "disk_cache_size": 1 << 30,
                          "disk_min_tokens": options["kv"]["tokens_per_block"]}
    if in_processes:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(
            target=prefill, args=(theirs, folder, roles[0], options | of_first, asked))
        process.start()
        contexts = ours.recv() if ours.poll(300) else []
        if has_disk:
            process.kill()
    else:
        first = Engine(folder, roles[0], **options | of_first)
        contexts = first.answer(first.requests(asked, KINDS[roles[0]]))
        if has_disk:
            first.end()
    decode = Engine(folder, roles[1], **options | of_second)
    try:
        found = decode.answer(decode.requests(asked, KINDS[roles[1]], [] if has_disk else contexts))
    finally:
        figures = decode.end()
        if in_processes:
            if not has_disk:
                ours.send(None)
            process.join(60)
        elif not has_disk:
            first.end()
    counts.update({"blocks_bytes": figures.get("KV Transfer Bytes", 0), "loaded": figures.get("Store Loaded Blocks", 0),
                   "accepted drafts": figures.get("Accepted Draft Tokens", 0)})
    wrong = list(differences(wanted, found, is_exact="deterministic" in options))
    lines = [f"{where}: request {number} {asked[number][1].keys()} differs in {name}" for number, name in wrong]
    if figures.get("KV Transfer Fallbacks"):
        lines.append(f"{where}: {figures['KV Transfer Fallbacks']} requests got no blocks")
    return counts, lines


def run(options: Options) -> Summary:
    enough = ENOUGH[options.tier]
    total = run_seeds(run_seed, options, lambda counts: counts["requests"] >= enough, seeds_a_portion=4)
    counts = total.counts
    return Summary(
        f"T26: seeds {options.first_seed}..{total.last_seed}: {counts['requests']:,} requests, "
        f"{counts['in two processes']:,} seeds in two processes, {counts['with a disk']:,} with a disk, "
        f"{counts['deterministic']:,} deterministic; {counts['loaded']:,} blocks loaded, "
        f"{counts['blocks_bytes']:,} bytes handed over, {counts['accepted drafts']:,} accepted drafts",
        total.failures,
        [] if counts["requests"] >= enough else [f"{counts['requests']:,} of {enough:,} requests"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(*run_seed(int(sys.argv[1]), Path(folder)), sep="\n")
