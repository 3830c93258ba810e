"""Write a workload for the benchmark: requests from random tokens, from texts, or from a trace.

    batch-manager workload --out offline.json                              64 requests, all at once
    batch-manager workload --out online.json --rate 2                      Poisson, 2 requests/s
    batch-manager workload --out single.json --n 1 --prompt 128 --output 128
    batch-manager workload --out prefix.json --prompt 600 --shared-prefix 512         prompts with a common prefix

The first argument may be a kind, which has its own options (batch-manager workload KIND --help):

    token-norm-dist   random tokens, normally distributed lengths
    token-unif-dist   random tokens, uniformly distributed lengths
    log-normal        random tokens, log-normal lengths
    dataset           texts and a tokenizer, or token ids
    trace             lengths and times of a trace: Azure, Mooncake, BurstGPT, CSV
    sample-trace      a synthetic trace in the format of Azure or Mooncake

The file is one JSON object: a description, and `requests`. Each request has `id`, `arrival_s` (seconds from the start),
`max_tokens` (the exact number of generated tokens: greedy, no end id) and `prompt`. The description is also printed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from .command_parser import CommandParser
from .datasets.errors import DatasetError
from .datasets.prompts import FIRST_ORDINARY_TOKEN
from .datasets.writing import check_writable, write_file
from .drawn_workload import (
    DEFAULT_VOCABULARY,
    EXIT_STATUSES,
    MOST_REQUESTS,
    MOST_VOCABULARY,
    OUTPUTS,
    PROMPTS,
    WRONG,
    at_least,
    make_workload,
    print_summary,
    within,
)
from .lengths import MOST_TOKENS, Lengths
from .standard_output import discard_standard_output

__all__ = ["FIRST_ORDINARY_TOKEN", "OUTPUTS", "PROMPTS", "Lengths", "at_least", "main", "make_workload", "within"]
INTERRUPTED = 130
KINDS = ("token-norm-dist", "token-unif-dist", "log-normal", "dataset", "trace", "sample-trace")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the workload and return the exit status.

    The first argument may be a kind of workload; see the module docstring. Without a kind, lengths are log-normal
    or fixed.
    """
    try:
        return _main([*(sys.argv[1:] if argv is None else argv)])
    except BrokenPipeError:
        discard_standard_output()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in KINDS:
        from .workload_kinds import main as main_of_kind

        return main_of_kind(arguments)
    if arguments and not arguments[0].startswith("-"):
        print(f"batch-manager workload: the kind is {arguments[0]!r}; expected one of {', '.join(KINDS)}; "
              "batch-manager workload --help describes them", file=sys.stderr)
        return WRONG
    return _main_without_kind(arguments)


def _main_without_kind(arguments: Sequence[str]) -> int:
    parser = CommandParser(prog="batch-manager workload", description=__doc__, epilog=EXIT_STATUSES,
                           usage="batch-manager workload [KIND] --out FILE [options]")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write; -: the standard output")
    parser.add_argument("--n", type=at_least(1, at_most=MOST_REQUESTS), default=64, help="requests (64)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of all random numbers (0)")
    parser.add_argument("--vocab", type=at_least(FIRST_ORDINARY_TOKEN + 1, at_most=MOST_VOCABULARY),
                        default=DEFAULT_VOCABULARY, help=f"vocabulary size ({DEFAULT_VOCABULARY})")
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s, Poisson; 0: all at once (0)")
    parser.add_argument("--prompt", type=at_least(0, at_most=MOST_TOKENS), default=0,
                        help="tokens of every prompt; 0: log-normal, median 128, sigma 0.8, 8 to 512 (0)")
    parser.add_argument("--output", type=at_least(0, at_most=MOST_TOKENS), default=0,
                        help="tokens of every output; 0: log-normal, median 64, sigma 0.7, 4 to 256 (0)")
    parser.add_argument("--shared-prefix", type=at_least(0), default=0,
                        help="length of a prefix that all prompts share (0)")
    options = parser.parse_args(arguments)
    if not 0 <= options.rate < float("inf"):
        parser.error(f"--rate is {options.rate}; expected requests/s, 0 or more; leave it out for all at once")

    try:
        workload = make_workload(
            count=options.n, seed=options.seed, vocab_size=options.vocab, rate=options.rate,
            prompts=replace(PROMPTS, fixed=options.prompt), outputs=replace(OUTPUTS, fixed=options.output),
            shared_prefix=options.shared_prefix)
        check_writable(options.out)
        write_file(options.out, [json.dumps(workload)])
    except DatasetError as error:
        print(f"batch-manager workload: {error}", file=sys.stderr)
        return WRONG
    print_summary(workload, options.out, shared_prefix=options.shared_prefix)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
