"""T3: a request has the same results alone and in all circumstances, bit by bit, on small random models.

    python -m tests.campaigns.deterministic SEED             repeats one seed and prints each difference
    python -m tests.campaigns.deterministic SEED --normal    runs without the deterministic mode, in torch; exits with 1
                                                             if nothing differs; most seeds differ
    python -m tests.campaigns.deterministic SEED --normal --compiled
                                                             the same in compiled steps; calls with padding are in torch
                                                             and differ, and with AMX all in bfloat16

The tiles of AMX, whose sums differ from those of vectors, can be emulated on a machine with AVX-512 BF16 alone, slowly:

    export CC="gcc -mamx-tile -mamx-bf16 -include $PWD/tests/compiled/emulated_tiles.h"

The families take turns, with seeds one after the other. A seed chooses a dtype, weights quantised while they are loaded
or as stored, an FP8 cache or a plain one, a block size, compiled steps or steps in torch, and requests. It runs the
requests in several random circumstances: batches, chunks, pauses, cached blocks and drafts. Each result of a request is
compared with the reference result of the request. The two results are a pair. For the reference, the request runs
alone, in one chunk, without pauses, cached blocks and drafts, on one thread. The KV cache of the reference has blocks
of 64 tokens, so that a short request is one contiguous block.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")     # waiting threads sleep; spinning takes minutes on busy cores

import random
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

from tests.deterministic.differential import (
    FAMILIES,
    LAYOUTS,
    SAMPLINGS,
    Ask,
    Circumstances,
    Laboratory,
    make_checkpoint,
    vocab_of,
)

from .portions import run_seeds
from .registry import Options, Summary

ENOUGH = {"Q": 300, "F": 10_000, "C": 100_000}              # pairs
PAIRS_OF_A_CELL = {"Q": 0, "F": 10, "C": 100}
PAIRS_OF_A_FAMILY = {"Q": 0, "F": 200, "C": 3000}
WHOLE = 64                                                  # tokens of a reference block, which gives the same tiles
ASKS, RUNS, MOST_NEW, WIDEST = 12, 10, 7, 3
KINDS = ("greedy", "sampled", "beams")
AXES = (("alone", "batched"), ("contiguous", "paged"), ("whole", "chunked"), ("no pause", "paused"), ("miss", "hit"),
        KINDS)


def draw_ask(draw: random.Random, vocab: int, block: int, text: list[int], longest: int) -> Ask:
    """Return an Ask with a random prompt, whose first blocks may be equal to those of `text`.

    The prompt's length is a multiple of `block`, or one token more or less.
    """
    blocks = draw.randint(1, longest // block)
    length = block * blocks + draw.choice([-1, 0, 1])
    common = min(block * draw.randint(0, blocks), length)
    prompt = text[:common] + [draw.randrange(vocab) for _ in range(length - common)]
    count, kind = draw.randint(2, MOST_NEW), draw.choice(KINDS)
    sampling, width = {}, 1
    if kind == "sampled":
        sampling = {**draw.choice(SAMPLINGS[1:]), "random_seed": draw.getrandbits(63)}
    elif kind == "beams":
        width = draw.randint(2, WIDEST)
        sampling = draw.choice([{}, {"len_penalty": 1.0, "early_stopping": 0}, {"beam_search_diversity_rate": 0.3},
                                {"repetition_penalty": 1.3}])
    return Ask(tuple(prompt), count, tuple(sampling.items()), context_logits=draw.random() < 0.2, beam_width=width)


def draw_circumstances(draw: random.Random, asks: dict[int, Ask], block: int, contiguous: bool) -> Circumstances:
    if draw.random() < 0.08:
        return Circumstances(layout=draw.choice(list(LAYOUTS)), static=True)
    solitary, reuse = draw.random() < 0.25, draw.random() < 0.5
    chunk = None if contiguous else draw.choice([None, None, 0, *(block * count for count in range(1, 7))])
    pauses = {}
    if draw.random() < 0.6:
        pauses = {request_id: set(range(1, ask.count)) if draw.random() < 0.4 else {draw.randint(1, ask.count - 1)}
                  for request_id, ask in asks.items() if draw.random() < 0.8}
    arrivals = {request_id: draw.choice([0, draw.randint(0, 6)]) for request_id in asks}
    if reuse:                                               # request 1 publishes the common prefix for the others
        arrivals = {request_id: 8 + arrivals[request_id] if request_id > 1 else 0 for request_id in asks}
    circumstances = Circumstances(
        layout=draw.choice(list(LAYOUTS)), overlap=not solitary and draw.random() < 0.3, chunk=chunk, pauses=pauses,
        arrivals=arrivals, laziness=draw.choice([0.0, 0.0, 0.25]), solitary=solitary, reuse=reuse,
        seed=(seed := draw.getrandbits(32)), drafts=0.7 if seed % 2 else None)
    own = random.Random(seed)
    circumstances.resumed = {
        request_id: own.randint(1, ask.count - 1) for request_id, ask in asks.items()
        if ask.beam_width == 1 and not ask.context_logits and own.random() < 0.2}
    return circumstances


def describe_length(length: int, unit: int) -> str:
    over = (length + 1) % unit - 1
    return {-1: "k blocks - 1", 0: "k blocks", 1: "k blocks + 1"}.get(over, "the common text")


def kind_of(ask: Ask) -> str:
    return "beams" if ask.beam_width > 1 else "sampled" if "random_seed" in dict(ask.sampling) else "greedy"


def count_pair(counts: Counter, ask: Ask, request_id: int, circumstances: Circumstances, block: int,
               reused: int) -> None:
    """Count a pair in its cell, which has one value of each of AXES, and by chunk size, reused blocks and pauses."""
    length = len(ask.prompt)
    pauses = circumstances.pauses.get(request_id, ())
    is_chunked = circumstances.chunk is not None and circumstances.chunk < length
    counts[("alone" if circumstances.solitary else "batched", "contiguous" if length + ask.count <= block else "paged",
            "chunked" if is_chunked else "whole", "paused" if pauses else "no pause", "hit" if reused else "miss",
            kind_of(ask))] += 1
    if is_chunked and circumstances.chunk:
        counts["chunk blocks", circumstances.chunk // block] += 1
    if reused:
        counts["hit at block", reused // block if reused % block == 0 else "inside"] += 1
    for place in pauses:
        counts["pause at token", place] += 1


def run_seed(seed: int, parent: Path, deterministic: bool = True, compiled: bool = True) -> tuple[Counter, list[str]]:
    """Run one seed, with `compiled` perhaps in compiled steps. Returns (counts, a line for each run with differences).
    """
    draw, counts, found = random.Random(seed), Counter(engines=1), []
    family = FAMILIES[seed % len(FAMILIES)]
    is_long, contiguous = draw.random() < 0.15, draw.random() < 0.3
    wants_compiled = draw.random() < 0.75 and compiled
    cache = draw.choice([{}, {}, {}, {"max_attention_window": draw.randint(9, 120)}])
    if cache and draw.random() < 0.4:
        cache["sink_token_length"] = draw.randint(1, 80)
    if draw.random() < 0.1:
        cache["kv_cache_dtype"] = "fp8_e4m3"
    quantization = draw.choice([None, None, None, "int8", "int4"])
    if not wants_compiled:                                   # products of compiled steps alone read quantised weights
        quantization = None
    dtypes = ["float32", "bfloat16"] if wants_compiled else ["float32", "float32", "bfloat16", "float16"]
    options = {"dtype": draw.choice(dtypes), "kv_cache_options": cache, "deterministic": deterministic,
               "quantization": quantization, "max_beam_width": WIDEST, "cpu_compile": None if wants_compiled else False}
    folder = make_checkpoint(family, parent)
    reference = Laboratory(folder, tokens_per_block=WHOLE, **options)
    is_compiled = reference.backend("fused").info.dispatch == "compiled"     # if the model and its cache can be
    # A model that is only found not to be compiled when it is loaded keeps other matrices than with blocks of 8 tokens.
    block = WHOLE if contiguous else draw.choice([16, 16, 32, 128] if is_compiled else [8, 8, 16, 32][
        2 * wants_compiled :])
    # Compiled steps have the same bits on any number of threads, torch's have not.
    lab = Laboratory(folder, tokens_per_block=block, num_threads=draw.randint(1, 3) if is_compiled else 1,
                     reference=reference, **options)
    vocab, longest = vocab_of(family), 200 if is_long else WHOLE - MOST_NEW - 1
    text = [draw.randrange(vocab) for _ in range(longest + 1)]
    unit = 8 if contiguous and not is_long else block       # a block of 64 has the boundaries of smaller blocks
    asks = {number: draw_ask(draw, vocab, unit, text, max(longest, unit)) for number in range(1, ASKS + 1)}
    asks[1] = Ask(tuple(text), 2, context_logits=False)
    for run in range(RUNS):
        circumstances = draw_circumstances(draw, asks, block, contiguous)
        differences = lab.differences(asks, circumstances)
        for request_id, ask in asks.items():
            count_pair(counts, ask, request_id, circumstances, block, lab.reused.get(request_id, 0))
            counts["prompt", describe_length(len(ask.prompt), unit)] += 1
        drafted = circumstances.drafts is not None and not circumstances.static and circumstances.layout != "padded"
        counts["drafted"] += drafted * sum(ask.beam_width == 1 for ask in asks.values())
        counts["resumed"] += len(circumstances.resumed)
        counts.update(pairs=len(asks), tokens=sum(ask.count for ask in asks.values()), different=len(differences))
        counts["family", family] += len(asks)
        counts["kind", options["dtype"]] += len(asks)
        for kind in filter(None, (quantization, cache.get("kv_cache_dtype"))):
            counts["kind", kind] += len(asks)
        if differences:
            found.append(f"seed {seed}, run {run} (python -m tests.campaigns.deterministic {seed}): {family}, blocks "
                         f"of {block}, {options}, {circumstances}: {differences}")
    counts["pauses"] = lab.num_pauses
    counts["compiled"] = counts["pairs"] * is_compiled
    lab.close()
    reference.close()
    return counts, found


def run(options: Options) -> Summary:
    total, failures, last_seed = run_seeds(run_seed, options, lambda total: total["pairs"] >= ENOUGH[options.tier])
    names = "engines", "pairs", "drafted", "resumed", "compiled", "tokens", "pauses", "different"
    return Summary(f"T3: seeds {options.first_seed}..{last_seed}: " + ", ".join(
        f"{total[name]:,} {name}" for name in names),
        failures, short(total, options.tier), [f"{axis}: {values}" for axis, values in along_axes(total)])


def along_axes(total: Counter) -> list[tuple[str, str]]:
    """Return (name, count of each value as text) for families, kinds of numbers, prompt lengths and so on."""
    axes = []
    for name in ("family", "kind", "prompt", "chunk blocks", "hit at block", "pause at token"):
        values = sorted((key[1] for key in total if isinstance(key, tuple) and key[0] == name),
                        key=lambda value: (isinstance(value, str), value))
        axes.append((name, ", ".join(f"{total[name, value]:,} {value}" for value in values)))
    return axes


def is_possible(cell: tuple[str, ...]) -> bool:
    """Whether a cell can occur. A request in one block has no chunks: only the last chunk may end inside a block."""
    return not {"contiguous", "chunked"} <= set(cell)


def short(total: Counter, tier: str) -> list[str]:
    lines = []
    if total["pairs"] < ENOUGH[tier]:
        lines.append(f"{total['pairs']:,} of {ENOUGH[tier]:,} pairs")
    wanted = PAIRS_OF_A_FAMILY[tier]
    lines += [f"{family}: {total['family', family]} of {wanted} pairs"
              for family in FAMILIES if total["family", family] < wanted]
    wanted = PAIRS_OF_A_CELL[tier]
    return lines + [f"{', '.join(cell)}: {total[cell]} of {wanted} pairs"
                    for cell in filter(is_possible, product(*AXES)) if total[cell] < wanted]


def main() -> int:
    normal = "--normal" in sys.argv
    with tempfile.TemporaryDirectory() as parent:
        counts, found = run_seed(int(sys.argv[1]), Path(parent), not normal, not normal or "--compiled" in sys.argv)
    print(*found, f"{counts['pairs']} pairs, {counts['resumed']} resumed, {counts['compiled']} in compiled steps, "
          f"{counts['different']} different", sep="\n")
    return int(bool(found) != normal)


if __name__ == "__main__":
    sys.exit(main())
