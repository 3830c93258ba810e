"""The options of `batch-manager simulate`."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...config import BLOCK_SIZES, KvCacheConfig
from ..command_parser import CommandParser, at_least, positive, rate, share
from ..datasets import FORMATS
from ..shared_options import (
    CONCURRENCY,
    POLICIES,
    HelpFormatter,
    add_selection_arguments,
    add_shared,
    check_outputs,
    complete_selection,
    refuse_together,
    sweep_of,
)
from .cost_model import MOST_ERROR, P90_TO_MEDIAN
from .routing import ROUTING

ABOUT = """Simulate serving: the scheduler, the KV cache manager and the loop of this package serve a workload under a
virtual clock. A cost model predicts the time of each step. No model is loaded.

    batch-manager bench --model FOLDER --workload w.json --trace run.trace          a run to fit the cost model on
    batch-manager simulate --fit run.trace --out cost.json
    batch-manager simulate --cost cost.json --workload w.json                       the run again, simulated
    batch-manager simulate --cost cost.json --workload sample:azure --request-rate 3 --sweep max_batch_size=8,16,32 \\
        --sweep policy=guaranteed_no_evict,max_utilization --slo-ttft-ms 500 --plot plots
    batch-manager simulate --cost cost.json --workload sample:mooncake --replicas 8 --routing longest-prefix \\
        --block-reuse

Fit on a run that covers the plan: many and few sequences, long and short prompts. Steps beyond that range are
extrapolated, and the result counts them. Loads, sessions included, and figures are those of batch-manager bench;
batch-manager compare accepts both.
"""
HOW_IT_ENDS = """Sweepable settings: {swept}.

exit status: 0 done; 1 a request failed; 2 an option or a file is wrong; 130 Ctrl-C. Files are written whole or not at
all."""
MOST_REQUESTS, MOST_REPLICAS = 1_000_000, 10_000
FLAGS = {"on": True, "off": False}
# Setting -> {text: value}, or a function from text to value.
SWEPT: dict[str, Any] = {
    "policy": dict(zip(POLICIES, POLICIES)), "max_batch_size": at_least(1, at_most=MOST_REQUESTS),
    "max_num_tokens": at_least(1), "max_num_sequences": at_least(1, at_most=MOST_REQUESTS),
    "chunked_context": FLAGS, "block_reuse": FLAGS,
    "tokens_per_block": {str(size): size for size in BLOCK_SIZES},
    "max_tokens_in_paged_kvcache": at_least(1), "request_rate": rate, "concurrency": at_least(1),
    "replicas": at_least(1, at_most=MOST_REPLICAS), "routing": dict(zip(ROUTING, ROUTING))}
Swept = tuple[str, list[Any]]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. An invalid command line ends the program with a message and status 2."""
    parser = CommandParser(
        prog="batch-manager simulate", description=ABOUT, epilog=HOW_IT_ENDS.format(swept=", ".join(SWEPT)),
        formatter_class=HelpFormatter,
        usage="batch-manager simulate --cost FILE --workload FILE [option ...]\n"
              "       batch-manager simulate --fit TRACE [TRACE ...] --out FILE")
    _add_cost(parser)
    _add_engine(parser)
    _add_load(parser)
    _add_output(parser)
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(argv)
    options.command = argv
    _check(options, parser)
    return options


def _add_cost(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("cost of a step").add_argument
    add("--fit", type=Path, nargs="+", metavar="TRACE", help="fit a cost model on these traces, write it to --out")
    add("--result", type=Path, metavar="FILE",
        help="with --fit: the result of bench for the run; it adds model, precision and threads to results")
    add("--cost", type=Path, metavar="FILE", help="the cost model to simulate with")
    add("--max-fit-error", type=positive, default=100 * MOST_ERROR, metavar="PERCENT",
        help="refuse a cost model whose error on held-out steps is larger: of the median step and of the total time, "
             f"and, {P90_TO_MEDIAN:g} times as large, of the 90th percentile ({MOST_ERROR:.0%})".replace("%", "%%"))
    add("--scatter-seed", type=at_least(0), default=0, metavar="N", help="seed of the scatter of step times (0)")
    add("--no-scatter", action="store_true", help="every step takes exactly the predicted time")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    shared = partial(add_shared, add)
    shared("--policy", shown="guaranteed_no_evict", default="guaranteed_no_evict")
    shared("--max-batch-size", shown="32", type=SWEPT["max_batch_size"], default=32)
    shared("--max-num-tokens", shown="512", default=512)
    shared("--max-num-sequences", shown="as --max-batch-size", type=SWEPT["max_num_sequences"])
    shared("--chunked-context", shown="on", default=True)
    shared("--enable-trt-overlap", shown="off", default=False)
    shared("--max-tokens-in-paged-kvcache", shown="as in the fitted traces: the same tokens with --result, the same "
           "blocks without")
    shared("--tokens-per-block", shown=f"{KvCacheConfig().tokens_per_block}", default=KvCacheConfig().tokens_per_block)
    shared("--block-reuse", shown="off", default=False)
    shared("--max-seq-len", shown="those of the longest request")
    add("--replicas", type=SWEPT["replicas"], metavar="N", default=1,
        help=f"engines that share the requests, at most {MOST_REPLICAS:,} (1)")
    add("--routing", choices=ROUTING, default="round-robin", help="how requests are assigned to engines (round-robin)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    shared = partial(add_shared, add)
    shared("--workload", "a file of batch-manager workload, a dataset, texts or a trace; sample:azure and "
           "sample:mooncake come with the package")
    shared("--format", shown="by content", choices=FORMATS)
    shared("--tokenizer", "for texts")
    shared("--output-tokens", "of texts that do not specify it", type=at_least(1))
    shared("--concurrency", CONCURRENCY, "any")
    add_selection_arguments(parser)
    shared("--slo-ttft-ms")
    shared("--slo-itl-ms")
    shared("--slo-e2e-ms")
    shared("--slo-share", "for the two searches; with 0.99, a bound is one on the 99th percentile", "0.9", type=share,
           default=0.9)
    shared("--find-saturation", "as in bench: requests arrive at constant intervals, are completed at 0.95 of the rate "
           "or more while they arrive and, with bounds, the share --slo-share of them is within the bounds. A workload "
           "is repeated until the quarters of a run have the same tokens to 5 %%")
    add("--find-replicas", action="store_true",
        help="search for the fewest replicas that sustain --request-rate, or the arrival times of the workload; the "
             "first number is --replicas")
    shared("--max-probes", shown="16", default=16)
    shared("--sweep", "of several sweeps, each combination", type=sweep_of(SWEPT), default=[])


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    shared = partial(add_shared, add)
    shared("--out", "the result as JSON; with --fit the cost model")
    shared("--output-csv")
    shared("--requests-csv")
    shared("--report", "a table or one line of JSON", "table", choices=("table", "json", "none"), default="table")
    shared("--variant")
    shared("--plot", "those of a sweep")
    shared("--trace", "that of the first replica")
    add("--no-leaps", action="store_true", help="run every iteration one by one: slower, with the same figures")
    shared("--quiet")


def combinations(sweeps: Sequence[Swept]) -> list[dict[str, Any]]:
    """Return a list with a dictionary (setting -> value) for each combination of swept values. Without sweeps: [{}]."""
    names = [name for name, _ in sweeps]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in sweeps))]


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.fit is not None:
        for name in ("cost", "workload"):
            if getattr(options, name) is not None:
                parser.error(f"--fit and --{name} were given; --fit writes a cost model and simulates nothing; leave "
                             "one of them out")
        if options.out is None:
            parser.error("--fit was given without --out; expected a file for the cost model; name one")
    elif options.result is not None:
        parser.error("--result was given without --fit; it describes the run of the fitted traces; leave it out")
    elif options.cost is None or options.workload is None:
        parser.error("--cost and --workload are needed; --fit writes a cost model")
    swept = [name for name, _ in options.sweep]
    for name in swept:
        if swept.count(name) > 1:
            parser.error(f"--sweep {name} was given twice; expected each name once; put all its values into one sweep")
    searches = [name for name in ("find_saturation", "find_replicas") if getattr(options, name)]
    refuse_together(options, parser, [("find_saturation", "request_rate"), ("find_saturation", "find_replicas"), *(
        (name, other) for name in searches for other in ("sweep", "concurrency", "trace"))])
    if not searches and (options.slo_share != parser.get_default("slo_share")
                         or options.max_probes != parser.get_default("max_probes")):
        parser.error("--slo-share or --max-probes was given without a search, which alone uses it; add "
                     "--find-saturation or --find-replicas, or leave it out")
    if options.slo_share != parser.get_default("slo_share") and not any(
            (options.slo_ttft_ms, options.slo_itl_ms, options.slo_e2e_ms)):
        parser.error("--slo-share was given without a bound that requests can keep; add --slo-ttft-ms, --slo-itl-ms or "
                     "--slo-e2e-ms, or leave it out")
    complete_selection(options, parser,
                       has_rate=bool(options.request_rate) or "request_rate" in swept or options.find_saturation,
                       has_concurrency=bool(options.concurrency) or "concurrency" in swept,
                       search=searches[0] if searches else "")
    if options.trace is not None and options.sweep:
        parser.error("--trace and --sweep were given; a trace records one simulation; leave one of them out")
    if options.plot is not None and not (options.sweep or searches):
        parser.error("--plot was given without --sweep; it draws the results of a sweep; `batch-manager draw` "
                     "draws a --trace")
    inputs = {f"--{name}": path for name in ("cost", "workload", "result") if (path := getattr(options, name))}
    inputs |= {f"--fit {path}": path for path in options.fit or ()}
    check_outputs(options, parser, ("out", "output_csv", "requests_csv", "trace"), inputs)
