"""Make workloads of random tokens with random lengths, and help the commands that write workloads."""

import json
import sys
from typing import Any

import numpy as np

from ..errors import counted
from .datasets.errors import DatasetError
from .datasets.prompts import FIRST_ORDINARY_TOKEN
from .datasets.reading import check_memory, summarised
from .datasets.records import MOST_SECONDS
from .lengths import LengthDistribution, Lengths

PROMPTS = Lengths(median=128, sigma=0.8, shortest=8, longest=512)
OUTPUTS = Lengths(median=64, sigma=0.7, shortest=4, longest=256)
DEFAULT_VOCABULARY = 49152
MOST_VOCABULARY = 2**31 - 1
WRONG = 2
EXIT_STATUSES = "exit status: 0 the file is written; 2 an option or a file is wrong, nothing is written; 130 Ctrl-C"


def make_workload(*, count: int = 64, seed: int = 0, vocab_size: int = DEFAULT_VOCABULARY, rate: float = 0.0,
                  prompts: LengthDistribution = PROMPTS, outputs: LengthDistribution = OUTPUTS,
                  shared_prefix: int = 0, delays: str = "exponential") -> dict[str, Any]:
    """Return a workload in the form of the workload file.

    rate            requests/s; the first request arrives at time 0. A rate of 0: all requests arrive at time 0
    delays          times between requests: "exponential" (a Poisson process) or "constant"
    shared_prefix   length in tokens of a prefix that all prompts share. Prompts that are shorter consist of the
                    beginning of the prefix

    Raises DatasetError if all prompts are shorter than the prefix, if the prompts need more than half of the machine's
    memory, and if the last request arrives after more than MOST_SECONDS.
    """
    _check_duration(max(count - 1, 1) / rate if rate else 0.0, rate)
    random = np.random.default_rng(seed)
    prompt_lengths = prompts.draw(random, count)
    output_lengths = outputs.draw(random, count)
    if shared_prefix > (longest := int(prompt_lengths.max())):
        raise DatasetError("", f"--shared-prefix is {shared_prefix:,}", f"the longest prompt has {longest:,} tokens",
                           "lower --shared-prefix, or make the prompts longer")
    check_memory(int(prompt_lengths.sum()), "", "the prompts")
    arrivals = np.zeros(count)
    if rate and delays == "constant":
        arrivals = np.arange(count) / rate
    elif rate:
        arrivals = np.cumsum(random.exponential(1 / rate, count))
        arrivals -= arrivals[0]
        _check_duration(float(arrivals[-1]), rate)

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
    if shared_prefix:    # made last, so that it does not change the other random numbers
        prefix = random.integers(FIRST_ORDINARY_TOKEN, vocab_size, shared_prefix).tolist()
        for request in requests:
            request["prompt"][:shared_prefix] = prefix[:len(request["prompt"])]
    return {**summarised(requests, seed=seed, vocab_size=vocab_size), "mode": "online" if rate else "offline",
            "rate": rate, "requests": requests}


def _check_duration(seconds: float, rate: float) -> None:
    if seconds > MOST_SECONDS:
        raise DatasetError("", f"the rate is {rate:g} requests/s, at which the workload lasts {seconds:g} s",
                           f"expected at most {MOST_SECONDS:g} s", "raise the rate, or make fewer requests")


def print_summary(workload: dict[str, Any], out: str, *, shared_prefix: int = 0) -> None:
    """Print the description of the workload as one line of JSON, on stderr if the workload went to stdout.

    A line on stderr counts the prompts that are shorter than the shared prefix.
    """
    if shorter := sum(len(request["prompt"]) < shared_prefix for request in workload["requests"]):
        print(f"batch-manager workload: {shorter:,} of {counted(workload['n'], 'prompt')} "
              f"{'is' if shorter == 1 else 'are'} shorter than the shared prefix of {counted(shared_prefix, 'token')}; "
              "each such prompt is its beginning", file=sys.stderr)
    print(json.dumps({name: value for name, value in workload.items() if name != "requests"}),
          file=sys.stderr if out == "-" else sys.stdout)
