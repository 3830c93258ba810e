"""`batch-manager workload KIND` writes a workload or a synthetic trace.

A workload has random lengths, or is made from a dataset or a trace.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import BatchManagerError, counted
from .command_parser import CommandParser, at_least
from .datasets import (
    FORMATS,
    DatasetError,
    ReadReport,
    Selection,
    read_arrivals,
    read_workload,
    refuse_options_of_texts,
    selection_of,
)
from .datasets.prompts import FIRST_ORDINARY_TOKEN
from .datasets.samples import SAMPLE_ROWS
from .datasets.synthetic import ChatShape, TraceShape, sample_arrivals, sample_conversations
from .datasets.writing import TRACE_LINES, check_writable, dataset_text, write_file
from .drawn_workload import (
    DEFAULT_VOCABULARY,
    EXIT_STATUSES,
    MOST_VOCABULARY,
    OUTPUTS,
    PROMPTS,
    WRONG,
    make_workload,
    print_summary,
)
from .lengths import MOST_TOKENS, LengthDistribution, Lengths, NormalLengths, UniformLengths
from .shared_options import (
    HelpFormatter,
    add_rate_arguments,
    add_selection_arguments,
    add_shared,
    complete_selection,
)

WORKLOAD_FORMS = ("workload", "dataset")
AS_HELP = "workload: for batch-manager bench; dataset: for gptManagerBenchmark, {metadata, samples} (workload)"
FORMATS_HELP = "".join(["\n\nformats of FILE:\n",
                        *(f"  {name:10} {meaning}\n" for name, meaning in FORMATS.items())])
DATASET_HELP = f"""Texts and a tokenizer, or token ids.

    batch-manager workload dataset prompts.jsonl --tokenizer FOLDER --output-tokens 64 --out w.json
{FORMATS_HELP[1:]}"""
TRACE_HELP = f"""Lengths and times from a trace. Prompts are random tokens that depend on --random-seed only. Prompts
that share block ids in a Mooncake trace share these tokens, so block reuse works as in the trace. A truncated prompt
keeps its beginning, so truncation raises the shared fraction of prompts. Requests with an empty prompt or output are
left out, and their number is printed. The package has two synthetic traces: sample:azure and sample:mooncake.

    batch-manager workload trace sample:mooncake --num-requests 20 --max-input-tokens 2000 --time-scale 0.5 --out w.json
{FORMATS_HELP[1:]}"""
SAMPLE_HELP = """A synthetic trace: bursts, long-tailed lengths and, for mooncake, prompts with shared prefixes. It
depends on the options only.

    batch-manager workload sample-trace --as mooncake --num-requests 200 --out trace.jsonl
"""


def main(kind: str, arguments: Sequence[str], *, description: str | None = None) -> int:
    """Write a workload and return the exit status.

    kind          a name of KINDS
    description   text for --help; None: that of the kind
    """
    add_arguments, own_description, write = KINDS[kind]
    parser = CommandParser(prog="batch-manager workload" + (f" {kind}" if description is None else ""),
                           usage=None if description is None else "batch-manager workload [KIND] --out FILE [options]",
                           description=description or own_description, epilog=EXIT_STATUSES,
                           formatter_class=HelpFormatter)
    add_shared(parser.add_argument, "--out", "-: the standard output", required=True, type=str)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    options.kind = kind
    if "delays" in options:
        complete_selection(options, parser, has_rate=bool(options.request_rate))
    try:
        inputs = {"FILE": getattr(options, "file", None), "--tokenizer": getattr(options, "tokenizer", None)}
        check_writable(options.out, {name: path for name, path in inputs.items() if path is not None})
        write(options)
    except DatasetError as error:
        print(f"batch-manager workload: {error}", file=sys.stderr)
        return WRONG
    return 0


def _add_drawn(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_shared(add, "--num-requests", shown="64", default=64)
    add_rate_arguments(add, "", "0", default=0.0)
    add("--shared-prefix", type=at_least(0), default=0, metavar="N",
        help="length of a prefix that all prompts share (0)")
    _add_vocabulary(parser)
    add("--as", dest="form", choices=WORKLOAD_FORMS, default="workload", help=AS_HELP)


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--vocab", type=int, metavar="N", help=f"vocabulary size ({DEFAULT_VOCABULARY})")
    add_shared(group.add_argument, "--tokenizer", "its vocabulary is used")


def _add_normal(parser: argparse.ArgumentParser) -> None:
    for side, text in (("input", "prompts"), ("output", "outputs")):
        parser.add_argument(f"--{side}-mean", type=float, required=True, metavar="TOKENS",
                            help=f"mean length of the {text}")
        parser.add_argument(f"--{side}-stdev", type=float, required=True, metavar="TOKENS",
                            help=f"standard deviation of the {text}; 0: all equal")
    _add_drawn(parser)


def _add_uniform(parser: argparse.ArgumentParser) -> None:
    for side, text in (("input", "prompt"), ("output", "output")):
        parser.add_argument(f"--{side}-min", type=int, required=True, metavar="TOKENS", help=f"shortest {text}")
        parser.add_argument(f"--{side}-max", type=int, required=True, metavar="TOKENS", help=f"longest {text}")
    _add_drawn(parser)


def _add_log_normal(parser: argparse.ArgumentParser) -> None:
    for side, lengths in (("input", PROMPTS), ("output", OUTPUTS)):
        add = parser.add_argument
        add(f"--{side}-median", type=float, default=lengths.median, metavar="TOKENS", help=f"({lengths.median})")
        add(f"--{side}-sigma", type=float, default=lengths.sigma, metavar="S",
            help=f"standard deviation of the logarithm of {side} lengths ({lengths.sigma})")
        add(f"--{side}-min", type=int, default=lengths.shortest, metavar="TOKENS", help=f"({lengths.shortest})")
        add(f"--{side}-max", type=int, default=lengths.longest, metavar="TOKENS", help=f"({lengths.longest})")
    _add_drawn(parser)


def _normal(options: argparse.Namespace, side: str) -> LengthDistribution:
    mean, deviation = getattr(options, f"{side}_mean"), getattr(options, f"{side}_stdev")
    _check(f"--{side}-mean", mean, 0 < mean <= MOST_TOKENS, f"more than 0, at most {MOST_TOKENS}")
    _check(f"--{side}-stdev", deviation, 0 <= deviation <= MOST_TOKENS, f"0 to {MOST_TOKENS}")
    return NormalLengths(mean, deviation)


def _uniform(options: argparse.Namespace, side: str) -> LengthDistribution:
    return UniformLengths(*_limits(options, side))


def _log_normal(options: argparse.Namespace, side: str) -> LengthDistribution:
    median, sigma = getattr(options, f"{side}_median"), getattr(options, f"{side}_sigma")
    _check(f"--{side}-median", median, 0 < median <= MOST_TOKENS, f"more than 0, at most {MOST_TOKENS}")
    _check(f"--{side}-sigma", sigma, 0 <= sigma <= 10, "0 to 10")
    return Lengths(median, sigma, *_limits(options, side))


def _limits(options: argparse.Namespace, side: str) -> tuple[int, int]:
    shortest, longest = getattr(options, f"{side}_min"), getattr(options, f"{side}_max")
    _check(f"--{side}-min", shortest, shortest >= 1, "at least 1")
    _check(f"--{side}-max", longest, shortest <= longest <= MOST_TOKENS,
           f"{shortest} (--{side}-min) to {MOST_TOKENS}")
    return shortest, longest


def _check(name: str, value: float, is_right: bool, expected: str) -> None:
    if not is_right:
        raise DatasetError("", f"{name} is {value}", f"expected {expected}")


def _write_drawn(of_side: Callable[[argparse.Namespace, str], LengthDistribution]) -> Callable:
    def write(options: argparse.Namespace) -> None:
        _write(make_workload(
            count=options.num_requests, seed=options.random_seed, vocab_size=_vocabulary(options),
            rate=options.request_rate, prompts=of_side(options, "input"), outputs=of_side(options, "output"),
            shared_prefix=options.shared_prefix, delays=options.delays), options)

    return write


def _vocabulary(options: argparse.Namespace) -> int:
    if options.tokenizer is not None:
        from ..extras.tokenizer import load_tokenizer

        try:
            return load_tokenizer(options.tokenizer).get_vocab_size()
        except BatchManagerError as error:
            raise DatasetError("", f"--tokenizer: {error.fact}", error.expectation, error.fix) from None
    size = DEFAULT_VOCABULARY if options.vocab is None else options.vocab
    _check("--vocab", size, FIRST_ORDINARY_TOKEN < size <= MOST_VOCABULARY,
           f"{FIRST_ORDINARY_TOKEN + 1} to {MOST_VOCABULARY}")
    return size


def _write(workload: dict[str, Any], options: argparse.Namespace) -> None:
    if "sessions" in workload and options.form != "workload":
        raise DatasetError("", f"the file has {counted(workload['sessions'], 'session')} of several turns",
                           f"expected requests alone with --as {options.form}, which has no field for sessions",
                           "pass --turns 1, or write a workload")
    text = json.dumps(workload) if options.form == "workload" else dataset_text(workload, options.kind)
    write_file(options.out, [text])
    print_summary(workload, options.out, shared_prefix=getattr(options, "shared_prefix", 0))


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="input file; may be compressed with gzip")
    add_shared(parser.add_argument, "--format", shown="by content", choices=FORMATS)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    _add_vocabulary(parser)
    add_shared(parser.add_argument, "--output-tokens", "of texts that do not specify it", type=at_least(1))
    parser.add_argument("--as", dest="form", choices=WORKLOAD_FORMS, default="workload", help=AS_HELP)
    add_selection_arguments(parser)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    _add_vocabulary(parser)
    parser.add_argument("--as", dest="form", choices=(*WORKLOAD_FORMS, *TRACE_LINES), default="workload",
                        help=f"{AS_HELP[:-len(' (workload)')]}; azure, mooncake, csv: a trace, without prompts "
                        "(workload)")
    add_selection_arguments(parser)


def _write_read(options: argparse.Namespace) -> None:
    selection, report = selection_of(options), ReadReport()
    output_tokens = getattr(options, "output_tokens", None)
    if output_tokens is not None:
        _check("--output-tokens", output_tokens, 1 <= output_tokens <= MOST_TOKENS, f"1 to {MOST_TOKENS}")
    if options.form in TRACE_LINES:
        arrivals = read_arrivals(options.file, selection, format=options.format, tokenizer=options.tokenizer,
                                 output_tokens=output_tokens, report=report)
        write_file(options.out, TRACE_LINES[options.form](arrivals))
        _print_trace_summary(report.kept, options)
    else:
        _write(_read(options, selection, output_tokens, report), options)
    for note in report.notes():
        print(f"batch-manager workload: {note}", file=sys.stderr)


def _read(options: argparse.Namespace, selection: Selection, output_tokens: int | None,
          report: ReadReport) -> dict[str, Any]:
    # A dataset has tokens. The tokens of a trace are random and need a vocabulary size.
    is_open = options.kind == "dataset" and options.vocab is None and options.tokenizer is None
    try:
        workload = read_workload(options.file, selection, format=options.format, tokenizer=options.tokenizer,
                                 vocab_size=MOST_VOCABULARY if is_open else _vocabulary(options),
                                 output_tokens=output_tokens, report=report)
    except DatasetError:
        _check_kind(options, report.format)
        raise
    _check_kind(options, report.format)
    refuse_options_of_texts(report.format, {"--output-tokens": output_tokens})
    if is_open and workload["vocab"] == MOST_VOCABULARY:
        workload["vocab"] = 1 + max(max(request["prompt"]) for request in workload["requests"])
    return workload


def _check_kind(options: argparse.Namespace, format: str) -> None:
    """Raise DatasetError if the KIND on the command line does not read files of this format.

    The kind `trace` reads traces, and the kind `dataset` reads all other formats.
    """
    right = {"": options.kind, "texts": "dataset", "dataset": "dataset", "workload": "dataset"}.get(format, "trace")
    if right != options.kind:
        raise DatasetError(options.file, f"the format is {format}",
                           f"`batch-manager workload {options.kind}` reads other formats",
                           f"use `batch-manager workload {right}`")


def _print_trace_summary(count: int, options: argparse.Namespace) -> None:
    print(json.dumps({"n": count, "as": options.form}), file=sys.stderr if options.out == "-" else sys.stdout)


def _add_sample(parser: argparse.ArgumentParser) -> None:
    shape, chat, add = TraceShape(), ChatShape(), parser.add_argument
    add("--as", dest="form", choices=tuple(TRACE_LINES), default="azure",
        help="azure, csv: independent requests; mooncake: conversations with block ids (azure)")
    add_shared(add, "--num-requests", shown=f"{SAMPLE_ROWS}", default=SAMPLE_ROWS)
    add_shared(add, "--request-rate", "the mean, 0.000001 to 1000000", f"{shape.request_rate}",
               default=shape.request_rate)
    add("--burstiness", type=float, default=shape.burstiness, metavar="X",
        help="standard deviation of the times between requests over their mean; gamma-distributed; 1: Poisson "
        f"({shape.burstiness})")
    add("--input-median", type=float, metavar="TOKENS",
        help=f"median prompt length, log-normal ({shape.input_median:g}); mooncake: tokens of a user turn "
        f"({chat.turn_median:g})")
    add("--output-median", type=float, default=shape.output_median, metavar="TOKENS",
        help=f"median output length, log-normal ({shape.output_median:g})")
    add_shared(add, "--random-seed", shown="0", default=0)


def _write_sample(options: argparse.Namespace) -> None:
    _check("--request-rate", options.request_rate, 1e-6 <= options.request_rate <= 1e6, "0.000001 to 1000000")
    _check("--burstiness", options.burstiness, 0.05 <= options.burstiness <= 20, "0.05 to 20")
    _check("--output-median", options.output_median, 1 <= options.output_median <= MOST_TOKENS,
           f"1 to {MOST_TOKENS}")
    shape, chat = TraceShape(), ChatShape()
    median = options.input_median
    if median is None:
        median = chat.turn_median if options.form == "mooncake" else shape.input_median
    _check("--input-median", median, 1 <= median <= MOST_TOKENS, f"1 to {MOST_TOKENS}")
    shape = TraceShape(options.request_rate, options.burstiness, output_median=options.output_median,
                       input_median=median)
    arrivals: Iterable
    if options.form == "mooncake":
        arrivals = sample_conversations(options.num_requests, options.random_seed, shape, ChatShape(turn_median=median))
    else:
        arrivals = sample_arrivals(options.num_requests, options.random_seed, shape)
    write_file(options.out, TRACE_LINES[options.form](arrivals))
    _print_trace_summary(options.num_requests, options)


# kind -> (function that adds its options, its description in --help, function that writes the file)
KINDS: dict[str, tuple[Callable, str, Callable]] = {
    "token-norm-dist": (_add_normal, "Random tokens; lengths are normal, rounded up, at least 1.",
                        _write_drawn(_normal)),
    "token-unif-dist": (_add_uniform, "Random tokens; lengths are uniform between a minimum and a maximum.",
                        _write_drawn(_uniform)),
    "log-normal": (_add_log_normal, "Random tokens; lengths are log-normal, rounded, and clipped to their limits.",
                   _write_drawn(_log_normal)),
    "dataset": (_add_dataset, DATASET_HELP, _write_read),
    "trace": (_add_trace, TRACE_HELP, _write_read),
    "sample-trace": (_add_sample, SAMPLE_HELP, _write_sample),
}
