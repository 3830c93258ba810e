"""T20: every pair of features, triples and mixtures, in random worlds: every request gets what it gets alone.

    python -m tests.campaigns.matrix LETTERS SEED MODEL      repeats one world and prints how it differs

A seed runs a world of every pair on the scripted model and on two small models, a world of every triple whose features
are equal to alone with each other on one of the three, and mixtures of four features and more. See tests/matrix.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from tests.matrix.engines import Engines, judge
from tests.matrix.features import FEATURES
from tests.matrix.pairs import MARKS, all_pairs, mixtures
from tests.matrix.world import MODELS, SCRIPTED

from .portions import each_done
from .registry import Options, Summary

SEEDS = {"Q": 1, "F": 50, "C": 500}
MIXTURES_OF_A_SEED = 6
NEAR_TIES = 1e-3                        # largest share of worlds in which a token may depend on rounding
FIRST_SEED = 100                        # pytest runs the seeds before it


def worlds(seed: int) -> list[tuple[str, str]]:
    """Return the (features, model) of a seed."""
    draw, models = Random(f"matrix {seed}"), (SCRIPTED, *MODELS)
    found = [(pair, model) for pair in all_pairs() for model in models]
    found += [(triple, models[(seed + number) % 3]) for number, triple in enumerate(mixtures(3))]
    many = [mixture for size in range(4, len(FEATURES)) for mixture in mixtures(size)]
    found += [(mixture, draw.choice(models)) for mixture in draw.sample(many, MIXTURES_OF_A_SEED)]
    return [(letters, model) for letters, model in found
            if model != SCRIPTED or not any(FEATURES[letter].needs_model for letter in letters)]


def portion(seed: int) -> tuple[Counter, list[str]]:
    counts, found = Counter(), []
    with tempfile.TemporaryDirectory() as parent:
        engines = Engines(Path(parent))
        for letters, model in worlds(seed):
            counts["worlds"] += 1
            counts["worlds of", len(set(letters)), model] += 1
            repeat = f"python -m tests.campaigns.matrix {letters} {seed} {model}"
            try:
                verdict = judge(engines, letters, seed, model)
            except Exception as error:
                found.append(f"{repeat}: {type(error).__name__}: {error}")
                continue
            counts["near ties"] += verdict.near_ties
            counts["requests"] += verdict.requests
            counts["met", letters] += verdict.met
            if verdict.wrong:
                found.append(f"{repeat}: {verdict.wrong}")
    return counts, found


def run(options: Options) -> Summary:
    first, wanted, total, failures = FIRST_SEED + options.first_seed, SEEDS[options.tier], Counter(), []
    for _, (counts, found) in each_done(portion, ((seed,) for seed in range(first, first + wanted)), options):
        total.update(counts)
        total["seeds"] += 1
        failures += found
    never = [pair for pair in all_pairs() if not total["met", pair]]
    if never and not failures:
        failures.append(f"the features of {', '.join(never)} never took effect in one request")
    if total["near ties"] > max(1, NEAR_TIES * total["worlds"]):
        failures.append(f"in {total['near ties']} of {total['worlds']} worlds a token depends on rounding")
    least = min((pair for pair, mark in MARKS.items() if mark == "="), key=lambda pair: total["met", pair])
    sizes = sorted((key[1:], count) for key, count in total.items() if key[0] == "worlds of")
    return Summary(
        f"T20: seeds {options.first_seed}..{options.first_seed + total['seeds'] - 1}: {total['worlds']:,} worlds, "
        f"{total['requests']:,} requests beside others and alone; the features of each pair took effect in at least "
        f"{total['met', least]} requests ({least}); {total['near ties']} worlds depend on rounding",
        failures, [] if total["seeds"] == wanted else [f"{total['seeds']} of {wanted} seeds"],
        [f"worlds of {size} features on {model}: {count:,}" for (size, model), count in sizes])


def main() -> int:
    letters, seed, model = sys.argv[1:]
    with tempfile.TemporaryDirectory() as parent:
        verdict = judge(Engines(Path(parent)), letters, int(seed), model)
    print(verdict.wrong or f"equal; all features took effect in {verdict.met} requests")
    return int(bool(verdict.wrong))


if __name__ == "__main__":
    sys.exit(main())
