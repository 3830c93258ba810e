"""Write a workload for the benchmark: requests from random tokens, from texts, or from a trace.

    batch-manager workload --tokenizer FOLDER --out offline.json           64 requests, all at once
    batch-manager workload --request-rate 2 --out online.json              Poisson, 2 requests/s
    batch-manager workload --input-min 600 --input-max 600 --shared-prefix 512 --out prefix.json

--tokenizer takes the vocabulary of the model that will serve the workload. The first argument may be a kind, which has
its own options (batch-manager workload KIND --help); without one it is log-normal:

    token-norm-dist   random tokens, normally distributed lengths
    token-unif-dist   random tokens, uniformly distributed lengths
    log-normal        random tokens, log-normal lengths
    dataset           texts and a tokenizer, or token ids
    trace             lengths and times of a trace: Azure, Mooncake, BurstGPT, CSV
    sample-trace      a synthetic trace in the format of Azure or Mooncake

The file is one JSON object: a description, and `requests`. Each request has `id`, `arrival_s` (seconds from the start),
`max_tokens` (the exact number of generated tokens: greedy, no end id) and `prompt`. The description is also printed.
"""

import sys
from collections.abc import Sequence

from .__main__ import run_as
from .command_parser import at_least, within
from .datasets.prompts import FIRST_ORDINARY_TOKEN
from .drawn_workload import OUTPUTS, PROMPTS, WRONG, make_workload
from .lengths import Lengths

__all__ = ["FIRST_ORDINARY_TOKEN", "OUTPUTS", "PROMPTS", "Lengths", "at_least", "main", "make_workload", "within"]
KINDS = ("token-norm-dist", "token-unif-dist", "log-normal", "dataset", "trace", "sample-trace")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the workload and return the exit status.

    The first argument may be a kind of workload; see the module docstring. Without a kind, lengths are log-normal.
    """
    from .workload_kinds import main as main_of_kind

    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if arguments and arguments[0] in KINDS:
        return main_of_kind(arguments[0], arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        print(f"batch-manager workload: the kind is {arguments[0]!r}; expected one of {', '.join(KINDS)}; "
              "batch-manager workload --help describes them", file=sys.stderr)
        return WRONG
    return main_of_kind("log-normal", arguments, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(run_as("workload"))
