"""T23: tokens are drawn with the probabilities that temperature, top-k and top-p define, by each implementation.

    python -m tests.campaigns --tier F --suite T23
    TRITON_INTERPRET=1 python -m tests.campaigns.drawing 0 2000     the Triton kernel alone, for seeds 0..1999

For each set of parameters, the CPU version draws with as many seeds as the tier requires, at positions that differ; the
oracle draws with the same. Chi-square judges both, and each token that differs is counted: float32 rounds where the
oracle computes in float64. The two tokens at neighbouring positions of a seed must be independent, so chi-square also
judges pairs. Triton's interpreter is slow: the kernel draws with a thousandth of the seeds, compared with the oracle.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from tests.kernels.draws import KNOBS, VOCAB, arrays, exact_distribution, row_of_logits, standard_deviations

from .registry import Options, Summary

SEEDS = {"Q": 5_000, "F": 200_000, "C": 2_000_000}
PART = 5_000                      # draws at a time
MOST_DEVIATIONS = 5.0             # of chi-square, above its mean
MOST_DIFFERENT = 1e-5             # share of tokens that may differ from the oracle's
PAIRS = 12                        # vocabulary of the pairs of neighbouring positions
SHARE_OF_KERNEL = 1_000


def drawn(sample, logits: torch.Tensor, knob: tuple, seeds: np.ndarray, step: int = 0) -> np.ndarray:
    """Return the tokens [len(seeds)] of `sample`, in parts."""
    parts = []
    for first in range(0, len(seeds), PART):
        part = seeds[first : first + PART]
        rows = logits.expand(len(part), -1)
        tokens = sample(rows, *map(torch.from_numpy, arrays([knob] * len(part), part * 7919, part % 50 + step)))[0]
        parts.append(tokens.long().numpy())
    return np.concatenate(parts)


def with_kernel(first: int, count: int) -> str:
    """Draw with the interpreted kernel in a process of its own. Returns "tokens that differ from the oracle / tokens".
    """
    done = subprocess.run([sys.executable, "-m", "tests.campaigns.drawing", str(first), str(count)], text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).resolve().parents[2],
                          stdout=subprocess.PIPE, check=True)
    return done.stdout.strip()


def run(options: Options) -> Summary:
    from batch_manager.triton_kernels.cpu.sample_token import sample_token
    from batch_manager.triton_kernels.reference.sample_token import sample_token as oracle

    count, first = SEEDS[options.tier], options.first_seed
    seeds, different, worst, failures = np.arange(first, first + count), 0, -np.inf, []
    command = f"python -m tests.campaigns --tier {options.tier} --suite T23 --first-seed {first}"

    def judge(what: str, counts: np.ndarray, expected: np.ndarray) -> None:
        nonlocal worst
        deviations = standard_deviations(counts, expected)
        worst = max(worst, deviations)
        if deviations > MOST_DEVIATIONS:
            failures.append(f"{what}: chi-square is {deviations:.1f} standard deviations above its mean: {command}")

    for knob in KNOBS:
        row = row_of_logits()
        expected = exact_distribution(row, *knob) * count
        tokens, of_oracle = (drawn(sample, row, knob, seeds) for sample in (sample_token, oracle))
        judge(f"{knob}, CPU", np.bincount(tokens, minlength=VOCAB), expected)
        judge(f"{knob}, oracle", np.bincount(of_oracle, minlength=VOCAB), expected)
        different += int((tokens != of_oracle).sum())
        row = row_of_logits(PAIRS)
        if knob[1] < PAIRS:
            pairs = PAIRS * drawn(sample_token, row, knob, seeds) + drawn(sample_token, row, knob, seeds, step=1)
            p = exact_distribution(row, *knob)
            judge(f"{knob}, pairs", np.bincount(pairs, minlength=PAIRS**2), np.outer(p, p).ravel() * count)
    if different > MOST_DIFFERENT * count * len(KNOBS):
        failures.append(f"{different} tokens differ from the oracle's: {command}")
    of_kernel = with_kernel(first, count // SHARE_OF_KERNEL)
    if not of_kernel.startswith("0 /"):
        failures.append(f"kernel and oracle differ in {of_kernel} tokens: {command}")
    return Summary(
        f"T23: {len(KNOBS)} sets of parameters with seeds {first}..{first + count - 1}: chi-square at most {worst:.1f} "
        f"standard deviations above its mean; {different} of {count * len(KNOBS):,} tokens of the CPU differ from the "
        f"oracle's, {of_kernel} of the interpreted kernel", failures)


def main(first: int, count: int) -> None:
    from batch_manager.triton_kernels.reference.sample_token import sample_token as oracle
    from batch_manager.triton_kernels.sample_token import sample_token

    seeds, different = np.arange(first, first + count), 0
    for knob in KNOBS:
        row = row_of_logits()
        different += int((drawn(sample_token, row, knob, seeds) != drawn(oracle, row, knob, seeds)).sum())
    print(f"{different} / {count * len(KNOBS):,}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
