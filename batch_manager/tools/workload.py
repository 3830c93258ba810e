"""Write a workload for the benchmark: requests made of random tokens, a function of the options alone.

    python -m batch_manager.tools.workload --out offline.json                              64 requests, all at once
    python -m batch_manager.tools.workload --out online.json --rate 2                      Poisson, 2 requests a second
    python -m batch_manager.tools.workload --out single.json --n 1 --prompt 128 --output 128
    python -m batch_manager.tools.workload --out prefix.json --prompt 600 --shared-prefix 512         that begin alike

The file is one JSON object: what the workload is, and `requests`, each with `id`, `arrival_s` (seconds from the start),
`max_tokens` (generated exactly: greedy, no end id) and `prompt`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .datasets.prompts import FIRST_ORDINARY_TOKEN
from .datasets.reading import SAMPLING, length_summary


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths, clipped. Units: tokens.

    fixed   every length; 0: drawn
    """

    median: float
    sigma: float
    shortest: int
    longest: int
    fixed: int = 0

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        if self.fixed:
            return np.full(count, self.fixed)
        lengths = np.exp(random.normal(np.log(self.median), self.sigma, count))
        return np.clip(np.rint(lengths), self.shortest, self.longest).astype(int)


PROMPTS = Lengths(median=128, sigma=0.8, shortest=8, longest=512)
OUTPUTS = Lengths(median=64, sigma=0.7, shortest=4, longest=256)


def make_workload(*, count: int = 64, seed: int = 0, vocab_size: int = 49152, rate: float = 0.0,
                  prompts: Lengths = PROMPTS, outputs: Lengths = OUTPUTS, shared_prefix: int = 0) -> dict[str, Any]:
    """The workload as it stands in the file.

    rate            requests a second, arriving as a Poisson process, the first at 0; 0: all at once
    shared_prefix   first tokens that all prompts have in common
    """
    random = np.random.default_rng(seed)
    prompt_lengths = prompts.draw(random, count)
    output_lengths = outputs.draw(random, count)
    arrivals = np.zeros(count)
    if rate:
        arrivals = np.cumsum(random.exponential(1 / rate, count))
        arrivals -= arrivals[0]

    requests = [
        {
            "id": number,
            "arrival_s": round(float(arrival), 6),
            "max_tokens": int(output_length),
            "prompt": random.integers(FIRST_ORDINARY_TOKEN, vocab_size, int(prompt_length)).tolist(),
        }
        for number, (arrival, prompt_length, output_length)
        in enumerate(zip(arrivals, prompt_lengths, output_lengths, strict=True))
    ]
    if shared_prefix:    # drawn last: what is drawn without does not change
        prefix = random.integers(FIRST_ORDINARY_TOKEN, vocab_size, shared_prefix).tolist()
        for request in requests:
            request["prompt"][:shared_prefix] = prefix[:len(request["prompt"])]
    return {
        "seed": seed,
        "vocab": vocab_size,
        "mode": "online" if rate else "offline",
        "rate": rate,
        "n": count,
        "prompt_tokens": int(prompt_lengths.sum()),
        "output_tokens": int(output_lengths.sum()),
        "prompt_len": length_summary(prompt_lengths),
        "output_len": length_summary(output_lengths),
        "sampling": SAMPLING,
        "requests": requests,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batch_manager.tools.workload", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--n", type=at_least(1), default=64, help="requests (64)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of everything random (0)")
    parser.add_argument("--vocab", type=at_least(FIRST_ORDINARY_TOKEN + 1), default=49152,
                        help="tokens are below this (49152)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, Poisson; 0: all at once (0)")
    parser.add_argument("--prompt", type=at_least(0), default=0,
                        help="tokens of every prompt; 0: log-normal, median 128, sigma 0.8, 8 to 512 (0)")
    parser.add_argument("--output", type=at_least(0), default=0,
                        help="tokens of every output; 0: log-normal, median 64, sigma 0.7, 4 to 256 (0)")
    parser.add_argument("--shared-prefix", type=at_least(0), default=0,
                        help="first tokens that all prompts have in common (0)")
    options = parser.parse_args(argv)
    if not 0 <= options.rate < float("inf"):
        parser.error(f"--rate is {options.rate}: requests a second, or 0")

    workload = make_workload(
        count=options.n, seed=options.seed, vocab_size=options.vocab, rate=options.rate,
        prompts=replace(PROMPTS, fixed=options.prompt), outputs=replace(OUTPUTS, fixed=options.output),
        shared_prefix=options.shared_prefix)
    options.out.write_text(json.dumps(workload))
    print(json.dumps({name: value for name, value in workload.items() if name != "requests"}))
    return 0


def at_least(minimum: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from a minimum on."""
    def read(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is less than {minimum}")
        return number

    return read


if __name__ == "__main__":
    raise SystemExit(main())
