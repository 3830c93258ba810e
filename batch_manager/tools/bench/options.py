"""The options of `batch-manager bench`."""

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ...config import BLOCK_SIZES, LOAD_FORMATS, MODEL_IMPLEMENTATIONS, KvCacheConfig
from ...names import TrtGptModelType
from ..datasets import FORMATS
from ..output_file import why_no_folder, why_not_distinct, why_not_writable
from ..workload import at_least
from .engine import DTYPES, POLICIES
from .help_text import ABOUT, HOW_IT_ENDS
from .original_options import rewritten, told

TYPES = {"IFB": "InflightFusedBatching", "UIFB": "InflightBatching"}
LOG_LEVELS = {"verbose": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "internal_error": "CRITICAL"}
SWEPT = ("request_rate", "concurrency")
DEFAULT_KV_GIB = 1.0
OUTPUT_FILES = ("out", "output_csv", "responses_json_file", "stats_csv", "trace")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A line for most options, in a terminal that is wide enough."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size((120, 24)).columns, 120)
        super().__init__(prog, max_help_position=40, width=columns - 2)


def parse_options(argv: Sequence[str] | None = None, *, program: str = "batch-manager bench",
                  report: str = "table") -> argparse.Namespace:
    """The options of a command line. Ends the program with status 2, and a message, where they are wrong.

    program   its name in messages
    report    default of --report
    """
    parser = argparse.ArgumentParser(prog=program, description=ABOUT, epilog=f"{told()}\n\n{HOW_IT_ENDS}",
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
    add("--api", choices=("gptManager",), default="gptManager", help="there is one")
    add("--type", type=lambda name: TYPES.get(name, name), choices=TrtGptModelType.__members__,
        default=TrtGptModelType.InflightFusedBatching.name, metavar="NAME",
        help=f"batching scheme: {', '.join(TrtGptModelType.__members__)} (InflightFusedBatching)")
    add("--policy", choices=POLICIES, default="guaranteed_no_evict",
        help="scheduler policy (guaranteed_no_evict)")
    add("--max-batch", type=at_least(1), metavar="N", default=32,
        help="sequences in one step: max_batch_size (32)")
    add("--max-tokens-per-step", type=at_least(1), metavar="N", default=512,
        help="tokens in one step: max_num_tokens (512)")
    add("--max-num-sequences", type=int, metavar="N", help="requests active at a time; -1: unbounded (as --max-batch)")
    add("--chunked-context", action=flag,
        help="a prompt may be computed in chunks (on; V1 cannot)")
    add("--enable-trt-overlap", action=flag, default=False, help="two micro-batches of disjoint requests (off)")
    add("--kv-gib", type=positive, metavar="GIB",
        help="GiB of the KV cache pool, through KvCacheConfig.max_tokens (1)")
    add("--max-tokens-in-paged-kvcache", type=at_least(1), metavar="N",
        help="tokens of the KV cache pool, instead of --kv-gib")
    add("--kv-cache-free-gpu-mem-fraction", type=positive, metavar="X",
        help="share of the free memory that the KV cache pool may take; alone, or beside --max-tokens-in-paged-kvcache")
    add("--tokens-per-block", type=int, choices=BLOCK_SIZES, default=KvCacheConfig().tokens_per_block,
        help=f"of the KV cache ({KvCacheConfig().tokens_per_block})")
    add("--block-reuse", action=flag, default=False,
        help="KvCacheConfig.enable_block_reuse (off)")
    add("--kv-host-cache-bytes", type=at_least(0), metavar="N", default=0,
        help="host memory for evicted reusable blocks (0)")
    add("--max-attention-window", type=at_least(1), metavar="N", help="tokens that a query looks back on (all)")
    add("--sink-token-length", type=at_least(0), metavar="N", default=0,
        help="first tokens that stay visible outside of it (0)")
    add("--device", metavar="NAME", help='"cpu", "cuda", "cuda:1" (cuda where there is one)')
    add("--threads", type=at_least(1), metavar="N", default=2, help="threads of a CPU backend (2)")
    add("--dtype", choices=DTYPES, default="bfloat16",
        help="data type of weights and KV cache; auto: as GptManager and batch-manager inspect choose it (bfloat16)")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help='"dummy": random weights, config.json is enough')
    add("--cpu-compile", action=flag, default=None, help="steps on a CPU in compiled code, or not (where that can be)")
    add("--cuda-graphs", action=flag, default=None, help="replay captured graphs on a GPU (off)")
    add("--model-implementation", choices=MODEL_IMPLEMENTATIONS, default="auto",
        help="whose class computes the model (auto)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--workload", type=Path, required=True, metavar="FILE",
        help="the requests: a file of batch-manager workload, a dataset of gptManagerBenchmark, texts or a trace")
    add("--dataset-format", choices=FORMATS, help="of it (by content)")
    add("--tokenizer", type=Path, metavar="FOLDER", help="for texts (the model's)")
    add("--output-tokens", type=at_least(1), metavar="N", help="of texts that do not say how long their output is")
    add("--time-scale", type=positive, default=1.0, metavar="X",
        help="multiply the recorded arrival times: 0.5 is twice as fast (1)")
    add("--sort", action="store_true", help="sort a trace by arrival; without, times that go backwards are refused")
    add("--max-num-samples", type=at_least(1), metavar="N", help="no more than the first so many requests (all)")
    add("--request-rate", type=_rate, metavar="R",
        help="requests a second, instead of the workload's own arrival times; negative or inf: all at once")
    add("--enable-exp-delays", action=argparse.BooleanOptionalAction, default=False,
        help="with --request-rate: a Poisson process, instead of equal distances (off)")
    add("--random-seed", type=at_least(0), metavar="N", default=420, help="of the Poisson process (420)")
    add("--concurrency", type=at_least(1), metavar="N",
        help="so many requests are under way at a time; the next one arrives when one is done")
    add("--first-batch-delay", type=_not_negative, default=0.0, metavar="MS",
        help="milliseconds before the first request is handed over; they count as latency (0)")
    add("--static-emulated-batch-size", type=at_least(1), metavar="N",
        help="hand over whole batches of N requests, each when the one before is done")
    add("--static-emulated-timeout", type=_not_negative, default=500.0, metavar="MS",
        help="milliseconds after which a batch is handed over as it is (500)")
    add("--sweep", type=_sweep, metavar="NAME=V,V,...",
        help=f"serve the workload once for each value of {' or '.join(SWEPT)}, on one engine")
    add("--find-saturation", action="store_true",
        help="look for the highest request rate that is sustained: the share of --slo-share of the requests keeps the "
             "bounds, or without bounds requests are done at 0.95 of the rate at which they arrive")
    add("--max-probes", type=at_least(2), metavar="N", default=8, help="servings that --find-saturation may take (8)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    flag = argparse.BooleanOptionalAction
    add("--streaming", action=flag,
        help="a response for every token; without, only e2e is known of the latencies (on; off for V1 and beams)")
    add("--max-prompt-len", type=at_least(1), metavar="N", help="longer prompts are cut to so many tokens")
    add("--beam-width", type=at_least(1), metavar="N", default=1,
        help="beams of each request; tokens of the best one count (1)")
    add("--eos-id", type=at_least(-1), metavar="N", default=-1,
        help="end id; outputs may then be shorter; -1: none (-1)")
    add("--pad-id", type=at_least(-1), metavar="N", default=-1, help="pad id; -1: none (-1)")
    add("--return-context-logits", action=flag, default=False, help="responses carry them (off)")
    add("--return-generation-logits", action=flag, default=False, help="responses carry them (off)")
    add("--exclude-input-in-output-seq", action=flag, default=True,
        help="responses that are not streamed are without the prompt (on)")


def _add_measuring(parser: argparse.ArgumentParser, report: str) -> None:
    add = parser.add_argument_group("measuring and output").add_argument
    add("--warm-up", type=at_least(0), metavar="N", default=1, help="full batches before the clock starts (1)")
    add("--slo-ttft-ms", type=positive, metavar="MS", help="bound of a request's time to the first token, for goodput")
    add("--slo-itl-ms", type=positive, metavar="MS", help="bound of a request's mean time between tokens, for goodput")
    add("--slo-share", type=_share, default=0.9, metavar="S",
        help="share of the requests that --find-saturation wants within bounds (0.9)")
    add("--queue-times", action="store_true",
        help="ask the engine when each request was scheduled first, which takes it some host time in every iteration")
    add("--busy-neighbours", type=at_least(0), metavar="N", default=0,
        help="other processes that compute all the time while the workload is served (0)")
    add("--variant", metavar="TEXT", default="", help="a label for the result")
    add("--out", type=Path, metavar="FILE", help="write the result here, as JSON")
    add("--report", choices=("table", "json", "lines", "none"), default=report,
        help="on stdout: a table, the result as one line of JSON, or gptManagerBenchmark's lines \"[BENCHMARK] name "
             f"value\" ({report})")
    add("--output-csv", type=Path, metavar="FILE", help="gptManagerBenchmark's table: its names, a row a serving")
    add("--responses-json-file", type=Path, metavar="FILE", help="write the tokens of every request here")
    add("--stats-csv", type=Path, metavar="FILE", help="write the manager's statistics here, a row an iteration")
    add("--log-iteration-data", action="store_true", help="print each record of the statistics on stderr")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="of the package's log on stderr (warning)")
    add("--trace", type=Path, metavar="FILE",
        help="write a trace of the servings here; `batch-manager trace` reads it")
    add("--plot", type=Path, metavar="FOLDER",
        help="draw into this folder, as SVG: what steps computed, the KV cache, times by batch size and, of a sweep, "
             "latency by throughput")
    add("--quiet", action="store_true", help="no progress on stderr")
    add("--compare", nargs=argparse.REMAINDER, metavar="FILE",
        help="as the first option: serve nothing, but compare results as `batch-manager compare` does")


# ---------------------------------------------------------------------- values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and finite")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more and finite")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most 1")
    return value


def _rate(text: str) -> float:
    """Requests a second; 0.0: all at once."""
    value = _number(text)
    if value == 0 or math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text} is no rate; expected requests a second; negative or inf: all at once")
    return value if 0 < value < math.inf else 0.0


def _sweep(text: str) -> tuple[str, list[float]]:
    name, _, listed = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT or not listed:
        expected = " or ".join(f"{known}=1,2,4" for known in SWEPT)
        raise argparse.ArgumentTypeError(f"{text!r} is no sweep; expected {expected}")
    try:
        values = [_rate(value) if name == "request_rate" else at_least(1)(value) for value in listed.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value twice; expected each once")
    return name, values


# ---------------------------------------------------------------------- what follows from several of them


def _complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    is_in_flight = options.type != TrtGptModelType.V1.name
    if options.streaming and options.beam_width > 1:
        parser.error(f"--streaming was given and --beam-width is {options.beam_width}; responses of beams are not "
                     "streamed; leave one of them out")
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
        parser.error("--compare was given after other options; expected it as the first one, with results after it; "
                     "leave the others out")
    for names in (("kv_gib", "max_tokens_in_paged_kvcache"), ("kv_gib", "kv_cache_free_gpu_mem_fraction"),
                  ("request_rate", "concurrency"), ("sweep", "find_saturation"), ("sweep", "request_rate"),
                  ("sweep", "concurrency"), ("find_saturation", "request_rate"), ("find_saturation", "concurrency"),
                  ("sweep", "stats_csv"), ("find_saturation", "stats_csv"), ("sweep", "responses_json_file"),
                  ("find_saturation", "responses_json_file")):
        if all(getattr(options, name) not in (None, False) for name in names):
            first, second = (f"--{name.replace('_', '-')}" for name in names)
            parser.error(f"{first} and {second} were both given; expected one of them; leave one out")
    if options.time_scale != 1 and (options.request_rate is not None or options.concurrency or options.sweep
                                    or options.find_saturation):
        parser.error("--time-scale was given with a rate or a concurrency, which take the place of recorded times; "
                     "expected one of them; leave one out")
    swept = options.sweep is not None and options.sweep[0] == "request_rate"
    if options.enable_exp_delays and not (options.request_rate or swept or options.find_saturation):
        parser.error("--enable-exp-delays was given and there is no rate; expected --request-rate or a sweep of it; "
                     "give one, or leave it out")
    if options.plot is not None and options.type == TrtGptModelType.V1.name:
        parser.error("--plot was given and --type is V1, whose statistics describe batches and not iterations; choose "
                     "another type, or leave --plot out")
    outputs = {f"--{name.replace('_', '-')}": path for name in OUTPUT_FILES
               if (path := getattr(options, name)) is not None}
    for option, path in outputs.items():
        if reason := why_not_writable(path):
            parser.error(f"{option}: {reason}")
    if reason := why_not_distinct(outputs, {"--workload": options.workload, "--model": options.model}):
        parser.error(reason)
    if options.plot is not None and (reason := why_no_folder(options.plot)):
        parser.error(f"--plot: {reason}")
