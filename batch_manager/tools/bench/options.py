"""The options of `batch-manager bench`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...config import LOAD_FORMATS, MAX_DRAFT_TOKENS, KvCacheConfig, SpeculativeConfig
from ...names import TrtGptModelType
from ..command_parser import CommandParser, at_least, positive, rate, share, within
from ..datasets import FORMATS
from ..shared_options import (
    CONCURRENCY,
    FLAG,
    HelpFormatter,
    add_selection_arguments,
    add_shared,
    check_outputs,
    complete_selection,
    refuse_together,
    sweep_of,
)
from .help_text import ABOUT, HOW_IT_ENDS
from .original_options import help_text, rewritten

TYPES = {"IFB": "InflightFusedBatching", "UIFB": "InflightBatching"}
LOG_LEVELS = {"verbose": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "internal_error": "CRITICAL"}
SWEPT = {"request_rate": rate, "concurrency": at_least(1)}
DEFAULT_KV_GIB = 1.0
MOST_DELAY_MS = 86_400_000     # one day
MOST_NEIGHBOURS = 1024         # processes
# Option -> the option without which it has no effect.
NEEDS = {"slo_share": "find_saturation", "max_probes": "find_saturation",
         "static_emulated_timeout": "static_emulated_batch_size"}
OUTPUT_FILES = ("out", "output_csv", "requests_csv", "responses_json_file", "stats_csv", "trace")


def parse_options(argv: Sequence[str] | None = None, *, program: str = "batch-manager bench") -> argparse.Namespace:
    """Parse the options of a command line. An invalid option ends the program with a message and status 2.

    program   name of the program in messages
    """
    parser = CommandParser(prog=program, description=ABOUT, epilog=f"{help_text()}\n\n{HOW_IT_ENDS}",
                           formatter_class=HelpFormatter,
                           usage=f"{program} --model FOLDER --workload FILE [option ...]\n"
                                 f"       {program} --compare A.json B.json")
    _add_engine(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_measuring(parser)
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(rewritten(argv, parser))
    options.command = list(argv)
    _complete(options, parser)
    _check(options, parser)
    return options


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    shared = partial(add_shared, add)
    shared("--model", type=Path, required=True)
    add("--api", choices=("gptManager",), default="gptManager",
        help="for command lines of gptManagerBenchmark; only gptManager is available")
    add("--type", type=lambda name: TYPES.get(name, name), choices=TrtGptModelType.__members__,
        default=TrtGptModelType.InflightFusedBatching.name, metavar="NAME",
        help=f"batching scheme: {', '.join(TrtGptModelType.__members__)} (InflightFusedBatching)")
    shared("--policy", shown="guaranteed_no_evict", default="guaranteed_no_evict")
    shared("--max-batch-size", shown="32", default=32)
    shared("--max-num-tokens", shown="512", default=512)
    shared("--max-num-sequences", "-1: unbounded", "as --max-batch-size")
    shared("--chunked-context", shown="on; not available with V1")
    shared("--enable-trt-overlap", shown="off", default=False)
    add("--kv-gib", type=positive, metavar="GIB",
        help="size of the KV cache pool in GiB, set through KvCacheConfig.max_tokens (1)")
    shared("--max-tokens-in-paged-kvcache", "instead of --kv-gib")
    shared("--kv-cache-free-gpu-mem-fraction", "alone, or with --max-tokens-in-paged-kvcache")
    shared("--tokens-per-block", shown=f"{KvCacheConfig().tokens_per_block}", default=KvCacheConfig().tokens_per_block)
    shared("--block-reuse", shown="off", default=False)
    add("--kv-host-cache-bytes", type=at_least(0), metavar="N", default=0,
        help="host memory for evicted reusable blocks (0)")
    for name in ("--disk-cache-path", "--disk-cache-size"):
        shared(name, shown="none")
    add("--max-attention-window", type=at_least(1), metavar="N", help="tokens that a query attends to (all)")
    add("--sink-token-length", type=at_least(0), metavar="N", default=0,
        help="sink tokens: first tokens that stay visible outside the window (0)")
    shared("--device", shown="cuda if available")
    shared("--num-threads", shown="2", default=2)
    shared("--dtype", "auto: as GptManager and batch-manager inspect choose it", "bfloat16", default="bfloat16")
    add("--load-format", choices=LOAD_FORMATS, default="auto",
        help='"dummy": random weights; only config.json is needed (auto)')
    shared("--lora-modules", "the requests have them in turn", "none", default=[], type=named_folder)
    shared("--max-loras", "without --lora-modules, the requests have so many of random numbers in turn", "all")
    shared("--max-lora-rank", "that of random ones", "16", default=16)
    add("--cpu-compile", action=FLAG, default=None,
        help="run CPU steps as compiled code (on if the model and the processor support it)")
    add("--cuda-graphs", action=FLAG, default=None, help="replay captured graphs on a GPU (off)")
    shared("--model-implementation", shown="auto", default="auto")
    shared("--quantization", shown="as stored")
    shared("--quantized-activations", shown="exact products")
    shared("--kv-cache-dtype", shown="auto", default="auto")
    shared("--speculative-config", shown="no drafts")
    add("--synthetic-acceptance", type=acceptance, metavar="P,P,...",
        help="instead: drafts that are right with these probabilities, place by place of a step. They are made of the "
             "outputs of a run without drafts, which comes before; the outputs of both are compared (no drafts)")
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        shared(name, shown="1", default=1)


def acceptance(text: str) -> list[float]:
    """The type of --synthetic-acceptance."""
    rates = [within(0, 1)(part) for part in text.split(",")]
    if len(rates) > MAX_DRAFT_TOKENS:
        raise argparse.ArgumentTypeError(f"{text[:60]}... has {len(rates)} places; expected at most {MAX_DRAFT_TOKENS}")
    return rates


def named_folder(text: str) -> str:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no adapter; expected NAME=FOLDER")
    return folder


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    shared = partial(add_shared, add)
    shared("--workload", "a file of batch-manager workload, a dataset, texts or a trace", type=Path, required=True)
    shared("--format", shown="by content", choices=FORMATS)
    shared("--tokenizer", "for texts", "the model's", type=Path)
    shared("--output-tokens", "of texts that do not specify it", type=at_least(1))
    shared("--concurrency", CONCURRENCY, "any")
    add("--first-batch-delay", type=within(0, MOST_DELAY_MS), default=0.0, metavar="MS",
        help="milliseconds before the first request is submitted; they count as latency (0)")
    add("--static-emulated-batch-size", type=at_least(1), metavar="N",
        help="submit whole batches of N requests, each when the previous one is done")
    add("--static-emulated-timeout", type=within(0, MOST_DELAY_MS), default=500.0, metavar="MS",
        help="milliseconds after which an incomplete batch is submitted (500)")
    shared("--sweep", f"of {' or '.join(SWEPT)}, on one engine", type=sweep_of(SWEPT))
    shared("--find-saturation", "requests arrive at constant intervals, are completed at 0.95 of the rate or more "
           "while they arrive and, with bounds, the share --slo-share of them is within the bounds. A workload of "
           "less than 16 full batches is repeated, up to 2,048 requests; one of at most 512 requests at least four "
           "times; any other, up to four times, until the quarters of a run have the same tokens to 5 %%")
    shared("--max-probes", "including the first with all requests at once", "8", default=8)
    add_selection_arguments(parser)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    flag = FLAG
    add_shared(add, "--streaming", "otherwise e2e is the only latency", "on; off for V1 and beams")
    add("--beam-width", type=at_least(1), metavar="N", default=1,
        help="beams per request; only the tokens of the best one are counted (1)")
    add("--eos-id", type=at_least(-1), metavar="N", default=-1,
        help="end id, which may end outputs early; -1: none (-1)")
    add("--pad-id", type=at_least(-1), metavar="N", default=-1, help="pad id; -1: none (-1)")
    add("--return-context-logits", action=flag, default=False, help="responses include context logits (off)")
    add("--return-generation-logits", action=flag, default=False, help="responses include generation logits (off)")
    add("--exclude-input-in-output-seq", action=flag, default=True,
        help="non-streamed responses do not include the prompt (on)")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measuring and output").add_argument
    add("--warm-up", type=at_least(0), metavar="N", default=1,
        help="full batches of the run, of at most 1,024 requests, that are served before the measurement (1)")
    shared = partial(add_shared, add)
    shared("--slo-ttft-ms")
    shared("--slo-itl-ms")
    shared("--slo-e2e-ms")
    shared("--slo-share", "for --find-saturation", "0.9", type=share, default=0.9)
    add("--queue-times", action="store_true",
        help="measure the time from arrival to the first step, which costs some host time in every iteration")
    add("--busy-neighbours", type=at_least(0, at_most=MOST_NEIGHBOURS), metavar="N", default=0,
        help="run N processes that compute without a pause during the run (0)")
    shared("--variant")
    shared("--out", "the result as JSON")
    shared("--report", "a table, one line of JSON, or gptManagerBenchmark's lines \"[BENCHMARK] name value\"", "table",
           choices=("table", "json", "lines", "none"), default="table")
    shared("--output-csv")
    shared("--requests-csv")
    add("--responses-json-file", type=Path, metavar="FILE", help="write the tokens of every request as JSON")
    add("--stats-csv", type=Path, metavar="FILE", help="write the manager's statistics, one row per iteration")
    add("--log-iteration-data", action="store_true", help="print the statistics of each iteration on stderr")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="level of the package's log on stderr (warning)")
    shared("--trace")
    shared("--plot", "tokens of the steps, KV cache, times by batch size and, for a sweep, latency by throughput")
    shared("--quiet")
    add("--compare", nargs=argparse.REMAINDER, metavar="FILE",
        help="must be the first option: compare results like `batch-manager compare`, without serving")


def _complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.sweep is not None:
        if len(options.sweep) > 1:
            names = " and ".join(name for name, _ in options.sweep)
            parser.error(f"--sweep was given for {names}; expected one --sweep, which lists all values of one name; "
                         "leave out the others")
        options.sweep = options.sweep[0]
    is_in_flight = options.type != TrtGptModelType.V1.name
    if options.streaming and options.beam_width > 1:
        parser.error(f"--streaming was given and --beam-width is {options.beam_width}; beam search does not stream; "
                     "leave out one of the two")
    if options.chunked_context is None:
        options.chunked_context = is_in_flight
    if options.streaming is None:
        options.streaming = is_in_flight and options.beam_width == 1
    if (options.kv_gib is None and options.max_tokens_in_paged_kvcache is None
            and options.kv_cache_free_gpu_mem_fraction is None):
        options.kv_gib = DEFAULT_KV_GIB
    options.keep_stats = options.stats_csv is not None or options.plot is not None


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.compare is not None:
        parser.error("--compare was given after other options; expected it as the first option, followed by results; "
                     "leave out the others")
    replaced = [] if options.sweep is None else [("sweep", options.sweep[0])]
    refuse_together(options, parser, (
        ("kv_gib", "max_tokens_in_paged_kvcache"), ("kv_gib", "kv_cache_free_gpu_mem_fraction"),
        ("sweep", "find_saturation"), ("find_saturation", "request_rate"), *replaced, ("sweep", "stats_csv"),
        ("find_saturation", "stats_csv"), ("sweep", "responses_json_file"), ("find_saturation", "responses_json_file"),
        ("speculative_config", "synthetic_acceptance"), ("find_saturation", "synthetic_acceptance")))
    if options.synthetic_acceptance is not None:
        if options.type == TrtGptModelType.V1.name or options.beam_width > 1:
            parser.error("--synthetic-acceptance was given with --type V1 or --beam-width above 1, which verify no "
                         "drafts; choose another type and one beam, or leave out --synthetic-acceptance")
        options.speculative_config = SpeculativeConfig("custom", len(options.synthetic_acceptance))
    swept = "" if options.sweep is None else options.sweep[0]
    complete_selection(options, parser,
                       has_rate=bool(options.request_rate or swept == "request_rate" or options.find_saturation),
                       has_concurrency=bool(options.concurrency or swept == "concurrency"),
                       search="find_saturation" if options.find_saturation else "")
    for name, needed in NEEDS.items():
        if getattr(options, name) != parser.get_default(name) and getattr(options, needed) in (None, False):
            first, second = (f"--{each.replace('_', '-')}" for each in (name, needed))
            parser.error(f"{first} was given without {second}, which alone uses it; add {second}, or leave out {first}")
    if options.plot is not None and options.type == TrtGptModelType.V1.name:
        parser.error("--plot was given with --type V1, which has no statistics of iterations; expected an in-flight "
                     "type; choose one, or leave out --plot")
    check_outputs(options, parser, OUTPUT_FILES, {"--workload": options.workload, "--model": options.model})
