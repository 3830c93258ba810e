"""The options of `batch-manager bench`."""

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ...config import BLOCK_SIZES, LOAD_FORMATS, MODEL_IMPLEMENTATIONS, KvCacheConfig
from ...names import TrtGptModelType
from ..command_parser import CommandParser
from ..datasets import FORMATS
from ..output_file import why_no_folder, why_not_distinct, why_not_writable
from ..workload import at_least
from .engine import DTYPES, POLICIES
from .help_text import ABOUT, HOW_IT_ENDS
from .original_options import help_text, rewritten

TYPES = {"IFB": "InflightFusedBatching", "UIFB": "InflightBatching"}
LOG_LEVELS = {"verbose": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "internal_error": "CRITICAL"}
SWEPT = ("request_rate", "concurrency")
LEAST_RATE = 1e-6           # requests/s: one in 11 days
DEFAULT_KV_GIB = 1.0
OUTPUT_FILES = ("out", "output_csv", "responses_json_file", "stats_csv", "trace")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter with wide columns, so that the help of most options takes one line."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size((120, 24)).columns, 120)
        super().__init__(prog, max_help_position=40, width=columns - 2)


def parse_options(argv: Sequence[str] | None = None, *, program: str = "batch-manager bench",
                  report: str = "table") -> argparse.Namespace:
    """Parse the options of a command line. An invalid option ends the program with a message and status 2.

    program   name of the program in messages
    report    default of --report
    """
    parser = CommandParser(prog=program, description=ABOUT, epilog=f"{help_text()}\n\n{HOW_IT_ENDS}",
                           formatter_class=HelpFormatter, allow_abbrev=False,
                           usage=f"{program} --model FOLDER --workload FILE [option ...]\n"
                                 f"       {program} --compare A.json B.json")
    _add_engine(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_measuring(parser, report)
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(rewritten(argv, parser))
    options.command = list(argv)
    _complete(options, parser)
    _check(options, parser)
    return options


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    flag = argparse.BooleanOptionalAction
    add("--model", type=Path, required=True, metavar="FOLDER",
        help="folder of a Hugging Face checkpoint, or a .gguf file")
    add("--api", choices=("gptManager",), default="gptManager",
        help="for command lines of gptManagerBenchmark; only gptManager is available")
    add("--type", type=lambda name: TYPES.get(name, name), choices=TrtGptModelType.__members__,
        default=TrtGptModelType.InflightFusedBatching.name, metavar="NAME",
        help=f"batching scheme: {', '.join(TrtGptModelType.__members__)} (InflightFusedBatching)")
    add("--policy", choices=POLICIES, default="guaranteed_no_evict",
        help="scheduler policy (guaranteed_no_evict)")
    add("--max-batch", type=at_least(1), metavar="N", default=32,
        help="requests in one step: max_batch_size (32)")
    add("--max-tokens-per-step", type=at_least(1), metavar="N", default=512,
        help="tokens in one step: max_num_tokens (512)")
    add("--max-num-sequences", type=int, metavar="N", help="requests active at a time; -1: unbounded (as --max-batch)")
    add("--chunked-context", action=flag,
        help="compute long prompts in chunks (on; not available with V1)")
    add("--enable-trt-overlap", action=flag, default=False, help="two micro-batches of disjoint requests (off)")
    add("--kv-gib", type=positive, metavar="GIB",
        help="size of the KV cache pool in GiB, set through KvCacheConfig.max_tokens (1)")
    add("--max-tokens-in-paged-kvcache", type=at_least(1), metavar="N",
        help="size of the KV cache pool in tokens, instead of --kv-gib")
    add("--kv-cache-free-gpu-mem-fraction", type=positive, metavar="X",
        help="share of the free memory for the KV cache pool; alone, or with --max-tokens-in-paged-kvcache")
    add("--tokens-per-block", type=int, choices=BLOCK_SIZES, default=KvCacheConfig().tokens_per_block,
        help=f"tokens in a block of the KV cache ({KvCacheConfig().tokens_per_block})")
    add("--block-reuse", action=flag, default=False,
        help="KvCacheConfig.enable_block_reuse (off)")
    add("--kv-host-cache-bytes", type=at_least(0), metavar="N", default=0,
        help="host memory for evicted reusable blocks (0)")
    add("--max-attention-window", type=at_least(1), metavar="N", help="tokens that a query attends to (all)")
    add("--sink-token-length", type=at_least(0), metavar="N", default=0,
        help="sink tokens: first tokens that stay visible outside the window (0)")
    add("--device", metavar="NAME", help='"cpu", "cuda", "cuda:1" (cuda if available)')
    add("--threads", type=at_least(1), metavar="N", default=2, help="threads of a CPU backend (2)")
    add("--dtype", choices=DTYPES, default="bfloat16",
        help="data type of weights and KV cache; auto: as GptManager and batch-manager inspect choose it (bfloat16)")
    add("--load-format", choices=LOAD_FORMATS, default="auto",
        help='"dummy": random weights; only config.json is needed (auto)')
    add("--cpu-compile", action=flag, default=None,
        help="run CPU steps as compiled code (on if the model and the processor support it)")
    add("--cuda-graphs", action=flag, default=None, help="replay captured graphs on a GPU (off)")
    add("--model-implementation", choices=MODEL_IMPLEMENTATIONS, default="auto",
        help="implementation of the model (auto)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--workload", type=Path, required=True, metavar="FILE",
        help="the requests: a file of batch-manager workload, a dataset of gptManagerBenchmark, texts or a trace")
    add("--dataset-format", choices=FORMATS, help="format of the workload (by content)")
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer for texts (the model's)")
    add("--output-tokens", type=at_least(1), metavar="N", help="output length of texts that do not specify one")
    add("--time-scale", type=positive, default=1.0, metavar="X",
        help="multiply the recorded arrival times: 0.5 is twice as fast (1)")
    add("--sort", action="store_true", help="sort a trace by arrival; by default, decreasing times are refused")
    add("--max-num-samples", type=at_least(1), metavar="N", help="serve only the first N requests (all)")
    add("--request-rate", type=_rate, metavar="R",
        help="requests/s, instead of the workload's own arrival times; negative or inf: all at once")
    add("--enable-exp-delays", action=argparse.BooleanOptionalAction, default=False,
        help="with --request-rate: a Poisson process, instead of equal intervals (off)")
    add("--random-seed", type=at_least(0), metavar="N", default=420, help="seed of the Poisson process (420)")
    add("--concurrency", type=at_least(1), metavar="N",
        help="N requests in progress at a time; the next one arrives when one is done")
    add("--first-batch-delay", type=_not_negative, default=0.0, metavar="MS",
        help="milliseconds before the first request is submitted; they count as latency (0)")
    add("--static-emulated-batch-size", type=at_least(1), metavar="N",
        help="submit whole batches of N requests, each when the previous one is done")
    add("--static-emulated-timeout", type=_not_negative, default=500.0, metavar="MS",
        help="milliseconds after which an incomplete batch is submitted (500)")
    add("--sweep", type=_sweep, action="append", metavar="NAME=V,V,...",
        help=f"serve the workload once for each value of {' or '.join(SWEPT)}, on one engine")
    add("--find-saturation", action="store_true",
        help="search for the highest sustained request rate: requests are completed at 0.95 of the rate or more while "
             "they arrive and, with bounds, the share --slo-share of them is within the bounds. A workload of less "
             "than 8 full batches is repeated, up to 2,048 requests")
    add("--max-probes", type=at_least(2), metavar="N", default=8,
        help="most runs of --find-saturation, including the first with all requests at once (8)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    flag = argparse.BooleanOptionalAction
    add("--streaming", action=flag,
        help="a response for every token; otherwise e2e is the only latency (on; off for V1 and beams)")
    add("--max-prompt-len", type=at_least(1), metavar="N", help="truncate longer prompts to N tokens")
    add("--beam-width", type=at_least(1), metavar="N", default=1,
        help="beams per request; only the tokens of the best one are counted (1)")
    add("--eos-id", type=at_least(-1), metavar="N", default=-1,
        help="end id, which may end outputs early; -1: none (-1)")
    add("--pad-id", type=at_least(-1), metavar="N", default=-1, help="pad id; -1: none (-1)")
    add("--return-context-logits", action=flag, default=False, help="responses include context logits (off)")
    add("--return-generation-logits", action=flag, default=False, help="responses include generation logits (off)")
    add("--exclude-input-in-output-seq", action=flag, default=True,
        help="non-streamed responses do not include the prompt (on)")


def _add_measuring(parser: argparse.ArgumentParser, report: str) -> None:
    add = parser.add_argument_group("measuring and output").add_argument
    add("--warm-up", type=at_least(0), metavar="N", default=1,
        help="full batches of the run, of at most 1,024 requests, that are served before the measurement (1)")
    add("--slo-ttft-ms", type=positive, metavar="MS", help="goodput: upper bound on the time to the first token")
    add("--slo-itl-ms", type=positive, metavar="MS",
        help="goodput: upper bound on the mean time between the tokens of a request")
    add("--slo-e2e-ms", type=positive, metavar="MS", help="goodput: upper bound on the time to the last token")
    add("--slo-share", type=_share, default=0.9, metavar="S",
        help="share of the requests that must be within the bounds, for --find-saturation (0.9)")
    add("--queue-times", action="store_true",
        help="measure the time from arrival to the first step, which costs some host time in every iteration")
    add("--busy-neighbours", type=at_least(0), metavar="N", default=0,
        help="run N processes that compute without a pause during the run (0)")
    add("--variant", metavar="TEXT", default="", help="a label for the result")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON")
    add("--report", choices=("table", "json", "lines", "none"), default=report,
        help="print a table, the result as one line of JSON, or gptManagerBenchmark's lines \"[BENCHMARK] name "
             f"value\" ({report})")
    add("--output-csv", type=Path, metavar="FILE",
        help="write a table with gptManagerBenchmark's names, one row per run")
    add("--responses-json-file", type=Path, metavar="FILE", help="write the tokens of every request as JSON")
    add("--stats-csv", type=Path, metavar="FILE", help="write the manager's statistics, one row per iteration")
    add("--log-iteration-data", action="store_true", help="print the statistics of each iteration on stderr")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="level of the package's log on stderr (warning)")
    add("--trace", type=Path, metavar="FILE",
        help="write a trace of the runs, for `batch-manager trace` and `draw`")
    add("--plot", type=Path, metavar="FOLDER",
        help="write plots as SVG: tokens of the steps, KV cache, times by batch size and, for a sweep, latency by "
             "throughput")
    add("--quiet", action="store_true", help="do not show progress on stderr")
    add("--compare", nargs=argparse.REMAINDER, metavar="FILE",
        help="must be the first option: compare results like `batch-manager compare`, without serving")


# ---------------------------------------------------------------------- values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected a finite number above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected a finite number of at least 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected more than 0 and at most 1")
    return value


def _rate(text: str) -> float:
    """Return the rate in requests/s. Returns 0.0 for a negative or infinite rate: all requests arrive at once."""
    value = _number(text)
    if value == 0 or math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text} is not a rate; expected requests/s, or a negative number or "
                                         "inf for all at once")
    if 0 < value < LEAST_RATE:
        raise argparse.ArgumentTypeError(f"{text} is too low; expected at least {LEAST_RATE:f} requests/s, or a "
                                         "negative number or inf for all at once")
    return value if 0 < value < math.inf else 0.0


def _sweep(text: str) -> tuple[str, list[float]]:
    name, _, listed = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT or not listed:
        expected = " or ".join(f"{known}=1,2,4" for known in SWEPT)
        raise argparse.ArgumentTypeError(f"{text!r} is not a sweep; expected {expected}")
    try:
        values = [_rate(value) if name == "request_rate" else at_least(1)(value) for value in listed.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text!r} repeats a value; expected each value once")
    return name, values


# ---------------------------------------------------------------------- combinations


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
    for names in (("kv_gib", "max_tokens_in_paged_kvcache"), ("kv_gib", "kv_cache_free_gpu_mem_fraction"),
                  ("request_rate", "concurrency"), ("sweep", "find_saturation"), ("sweep", "request_rate"),
                  ("sweep", "concurrency"), ("find_saturation", "request_rate"), ("find_saturation", "concurrency"),
                  ("sweep", "stats_csv"), ("find_saturation", "stats_csv"), ("sweep", "responses_json_file"),
                  ("find_saturation", "responses_json_file")):
        if all(getattr(options, name) not in (None, False) for name in names):
            first, second = (f"--{name.replace('_', '-')}" for name in names)
            parser.error(f"{first} and {second} were both given; expected at most one of them; leave one out")
    if options.time_scale != 1 and (options.request_rate is not None or options.concurrency or options.sweep
                                    or options.find_saturation):
        parser.error("--time-scale was given with a rate or a concurrency, which replaces the recorded times; "
                     "leave out --time-scale, or leave out --request-rate, --concurrency, --sweep and "
                     "--find-saturation")
    swept = options.sweep is not None and options.sweep[0] == "request_rate"
    if options.enable_exp_delays and not (options.request_rate or swept or options.find_saturation):
        parser.error("--enable-exp-delays was given without a rate; expected --request-rate, a sweep of it, or "
                     "--find-saturation; add one, or leave out --enable-exp-delays")
    if options.plot is not None and options.type == TrtGptModelType.V1.name:
        parser.error("--plot was given with --type V1, which has no statistics of iterations; expected an in-flight "
                     "type; choose one, or leave out --plot")
    outputs = {f"--{name.replace('_', '-')}": path for name in OUTPUT_FILES
               if (path := getattr(options, name)) is not None}
    for option, path in outputs.items():
        if reason := why_not_writable(path):
            parser.error(f"{option}: {reason}")
    if reason := why_not_distinct(outputs, {"--workload": options.workload, "--model": options.model}):
        parser.error(reason)
    if options.plot is not None and (reason := why_no_folder(options.plot)):
        parser.error(f"--plot: {reason}")
