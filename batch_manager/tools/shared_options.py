"""The options that several commands of batch-manager have. One quantity has one name, one meaning and one type."""

import argparse
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import (
    BLOCK_SIZES,
    DTYPES,
    KV_CACHE_DTYPES,
    MAX_RANKS,
    MODEL_IMPLEMENTATIONS,
    QUANTIZATIONS,
    QUANTIZED_ACTIVATIONS,
    SpeculativeConfig,
)
from ..errors import ConfigError
from ..names import SchedulerPolicy
from .command_parser import at_least, positive, rate
from .output_file import why_no_folder, why_not_distinct, why_not_writable

LONGER = ("clip", "drop")
DELAYS = ("exponential", "constant")
POLICIES = {"guaranteed_no_evict": SchedulerPolicy.GUARANTEED_NO_EVICT,
            "max_utilization": SchedulerPolicy.MAX_UTILIZATION}
CONCURRENCY = ("alone: the next one arrives when one is done, whatever the recorded times; with --request-rate: "
               "arrived requests wait in the client, which counts as latency")
FLAG = argparse.BooleanOptionalAction
MOST_DRAWN = 10_000_000        # requests



def speculative_config(text: str) -> SpeculativeConfig:
    """The type of --speculative-config."""
    try:
        return SpeculativeConfig.of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# Name -> (meaning, keywords of add_argument). A command may add to the meaning, and has its own default.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    # which requests, and when
    "--num-requests": ("number of requests", {"type": at_least(1, at_most=MOST_DRAWN), "metavar": "N"}),
    "--skip": ("leave out the first N requests", {"type": at_least(0), "metavar": "N"}),
    "--time-scale": ("multiply the recorded arrival times", {"type": positive, "metavar": "X"}),
    "--max-input-tokens": ("most tokens of a prompt", {"type": at_least(1), "metavar": "N"}),
    "--max-output-tokens": ("most tokens of an output", {"type": at_least(1), "metavar": "N"}),
    "--longer": ("truncate longer ones (clip) or leave the request out (drop), and print how many", {
        "choices": LONGER}),
    "--sort": ("sort a trace by arrival; by default, decreasing times are refused", {"action": "store_true"}),
    "--request-rate": ("requests/s", {"type": rate, "metavar": "R"}),
    "--delays": ("times between the requests of --request-rate; exponential is a Poisson process", {
        "choices": DELAYS}),
    "--random-seed": ("seed of random times, lengths and prompts", {"type": at_least(0), "metavar": "N"}),
    "--concurrency": ("requests in progress at a time", {"type": at_least(1), "metavar": "N"}),
    "--format": ("format of the file of requests", {}),
    "--tokenizer": ("a folder of a model, or a .gguf file, with the tokenizer", {"metavar": "FOLDER"}),
    "--output-tokens": ("tokens of an output", {"type": at_least(0), "metavar": "N"}),
    "--turns": ("most turns of a session or of ShareGPT's conversation; later ones are left out", {
        "type": at_least(1), "metavar": "N"}),
    "--workload": ("the requests", {"metavar": "FILE"}),
    # engine
    "--model": ("folder of a Hugging Face checkpoint, or a .gguf file", {"metavar": "FOLDER"}),
    "--policy": ("scheduler policy", {"choices": POLICIES}),
    "--max-batch-size": ("requests in one step", {"type": at_least(1), "metavar": "N"}),
    "--max-num-tokens": ("tokens in one step", {"type": at_least(1), "metavar": "N"}),
    "--max-num-sequences": ("requests active at a time", {"type": int, "metavar": "N"}),
    "--chunked-context": ("compute long prompts in chunks", {"action": FLAG}),
    "--enable-trt-overlap": ("two micro-batches of disjoint requests", {"action": FLAG}),
    "--max-tokens-in-paged-kvcache": ("size of the KV cache pool in tokens", {"type": at_least(1), "metavar": "N"}),
    "--tokens-per-block": ("tokens in a block of the KV cache", {"type": int, "choices": BLOCK_SIZES}),
    "--block-reuse": ("KvCacheConfig.enable_block_reuse", {"action": FLAG}),
    "--disk-cache-path": ("keep reusable blocks of prompts in this folder, for later runs too", {"metavar": "FOLDER"}),
    "--disk-cache-size": ("most bytes of the blocks in --disk-cache-path", {"type": at_least(1), "metavar": "BYTES"}),
    "--kv-cache-free-gpu-mem-fraction": ("share of the free memory for the KV cache pool", {
        "type": positive, "metavar": "X"}),
    "--max-seq-len": ("most tokens of a prompt and its output together", {"type": at_least(1), "metavar": "N"}),
    "--device": ('device of the model, such as "cpu", "cuda" or "cuda:1"', {"metavar": "NAME"}),
    "--dtype": ("data type of weights and KV cache", {"choices": DTYPES}),
    "--model-implementation": ("implementation of the model", {"choices": MODEL_IMPLEMENTATIONS}),
    "--quantization": ("quantise the matrices of layers while they are loaded", {"choices": QUANTIZATIONS}),
    "--quantized-activations": ("round what quantised weights are multiplied with: faster, and less exact", {
        "choices": QUANTIZED_ACTIVATIONS}),
    "--kv-cache-dtype": ("data type of keys and values in the KV cache", {"choices": KV_CACHE_DTYPES}),
    "--num-threads": ("threads of a CPU backend", {"type": at_least(1), "metavar": "N"}),
    "--tensor-parallel-size": ("processes that share each layer; without a launcher, torchrun starts them", {
        "type": at_least(1, at_most=MAX_RANKS), "metavar": "N"}),
    "--pipeline-parallel-size": ("stages, each with a part of the layers", {
        "type": at_least(1, at_most=MAX_RANKS), "metavar": "N"}),
    "--speculative-config": ("drafts, as JSON with vLLM's keys, such as {\"method\": \"ngram\"}", {
        "type": speculative_config, "metavar": "JSON"}),
    "--lora-modules": ("LoRA adapters in folders of peft", {"nargs": "+", "metavar": "NAME=FOLDER"}),
    "--max-loras": ("number of adapters of the largest rank on the device", {"type": at_least(1), "metavar": "N"}),
    "--max-lora-rank": ("largest rank of an adapter", {"type": at_least(1), "metavar": "N"}),
    "--streaming": ("a response for every token", {"action": FLAG}),
    # figures and output
    "--slo-ttft-ms": ("goodput: upper bound on the time to the first token", {"type": positive, "metavar": "MS"}),
    "--slo-itl-ms": ("goodput: upper bound on the mean time between the tokens of a request", {
        "type": positive, "metavar": "MS"}),
    "--slo-e2e-ms": ("goodput: upper bound on the time to the last token", {"type": positive, "metavar": "MS"}),
    "--slo-share": ("goodput: share of the requests that must be within the bounds", {
        "type": positive, "metavar": "S"}),
    "--find-saturation": ("search for the highest sustained request rate", {"action": "store_true"}),
    "--max-probes": ("most runs of a search", {"type": at_least(2), "metavar": "N"}),
    "--sweep": ("serve the workload once for each value", {"action": "append", "metavar": "NAME=V,V,..."}),
    "--out": ("the file to write", {"type": Path, "metavar": "FILE"}),
    "--output-csv": ("write a table with gptManagerBenchmark's names, one row per run", {
        "type": Path, "metavar": "FILE"}),
    "--requests-csv": ("write the latencies of every request as CSV, one row per request", {
        "type": Path, "metavar": "FILE"}),
    "--report": ("form of the result on the standard output", {}),
    "--plot": ("write plots as SVG into this folder", {"type": Path, "metavar": "FOLDER"}),
    "--trace": ("write a trace of the run, for `batch-manager trace` and `draw`", {"type": Path, "metavar": "FILE"}),
    "--variant": ("a label for the result", {"metavar": "TEXT", "default": ""}),
    "--quiet": ("do not show progress on stderr", {"action": "store_true"}),
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter with wide columns, so that the help of most options takes one line."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size((120, 24)).columns, 120)
        super().__init__(prog, max_help_position=40, width=columns - 2)


def add_shared(add: Callable[..., Any], name: str, more: str = "", shown: str = "", **keywords: Any) -> None:
    """Add the option `name` of `SHARED` to a parser.

    add        the parser's add_argument
    more       what this command adds to the meaning
    shown      the default in words; "": the option has none
    keywords   further keywords of add_argument, such as the default. A type may only narrow that of the table
    """
    meaning, shared = SHARED[name]
    add(name, help="; ".join(filter(None, (meaning, more))) + (f" ({shown})" if shown else ""),
        **{**shared, **keywords})


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add to a command's parser the options from which `datasets.selection_of` builds a Selection."""
    add = parser.add_argument_group("which requests, and when").add_argument
    add_shared(add, "--num-requests", "at most, from the beginning", "all")
    add_shared(add, "--skip", shown="0", dest="first", default=0)
    add_shared(add, "--turns", "1: requests without sessions", "all")
    add_shared(add, "--time-scale", "0.5 is twice as fast", "1", default=1.0)
    add_shared(add, "--max-input-tokens", shown="any")
    add_shared(add, "--max-output-tokens", shown="any")
    add_shared(add, "--longer", shown="clip")
    add_shared(add, "--sort")
    add_rate_arguments(add, "instead of the recorded times", "as recorded")


def add_rate_arguments(add: Callable[..., Any], more: str, shown: str, **keywords: Any) -> None:
    """Add the options of the arrival times: rate, kind of delays, and seed."""
    add_shared(add, "--request-rate", "; ".join(filter(None, (more, "0: all at once"))), shown, **keywords)
    add_shared(add, "--delays", shown="exponential")
    add_shared(add, "--random-seed", shown="0", default=0)


def complete_selection(options: argparse.Namespace, parser: argparse.ArgumentParser, *, has_rate: bool,
                       has_concurrency: bool = False, search: str = "") -> None:
    """Set the defaults of `add_selection_arguments`. Ends the program if an option would have no effect.

    has_rate, has_concurrency   whether a rate above 0, or a concurrency, is set or swept
    search   attribute of the option that asks for a search of a rate, whose requests arrive at constant intervals; "":
             none
    """
    if search and options.delays == "exponential":
        parser.error(f"--delays is exponential and --{search.replace('_', '-')} was given, whose requests arrive at "
                     "constant intervals; leave out --delays, or measure rates with --sweep request_rate=...")
    if getattr(options, "time_scale", 1) != 1 and (has_rate or has_concurrency or options.request_rate is not None):
        parser.error("--time-scale was given with a rate or a concurrency, which replaces the recorded times; leave "
                     "out --time-scale, or leave out --request-rate, --concurrency, --find-saturation and their sweep")
    if options.delays is not None and not has_rate:
        parser.error("--delays was given without --request-rate, whose requests it spaces; add a rate, or leave out "
                     "--delays")
    options.delays = "constant" if search else options.delays or DELAYS[0]
    if "longer" in options:
        if options.longer is not None and options.max_input_tokens is options.max_output_tokens is None:
            parser.error("--longer was given without a limit; expected --max-input-tokens or --max-output-tokens; add "
                         "one, or leave out --longer")
        options.longer = options.longer or LONGER[0]


def sweep_of(kinds: Mapping[str, Callable[[str], Any] | Mapping[str, Any]]) -> Callable[[str], tuple[str, list[Any]]]:
    """Return the type of --sweep NAME=V,V,... for argparse, whose values are (name, values).

    kinds   name of a setting -> {text: value}, or a function from text to value
    """
    def read(text: str) -> tuple[str, list[Any]]:
        name, _, listed = text.partition("=")
        name = name.replace("-", "_")
        if name not in kinds or not listed:
            raise argparse.ArgumentTypeError(f"{text!r} is not a sweep; expected NAME=V,V,... with a name of "
                                             f"{', '.join(kinds)}")
        kind, values = kinds[name], []
        for value in listed.split(","):
            if isinstance(kind, Mapping):
                if value not in kind:
                    raise argparse.ArgumentTypeError(f"{text!r} has the value {value!r}; expected {', '.join(kind)}")
                values.append(kind[value])
                continue
            try:
                values.append(kind(value))
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"{text!r} has a value twice; expected distinct values")
        return name, values
    return read


def refuse_together(options: argparse.Namespace, parser: argparse.ArgumentParser, pairs: Iterable[tuple[str, str]],
                    ) -> None:
    """End the program if both options of a pair, given by their attributes, were given."""
    for pair in pairs:
        values = [getattr(options, name) for name in pair]
        if all(value is not None and value is not False and value != [] for value in values):
            first, second = (f"--{name.replace('_', '-')}" for name in pair)
            parser.error(f"{first} and {second} were both given; expected at most one of them; leave one out")


def check_outputs(options: argparse.Namespace, parser: argparse.ArgumentParser, names: Iterable[str],
                  inputs: Mapping[str, str | os.PathLike[str]]) -> None:
    """End the program if an output file or the folder of --plot cannot be written, or if two options name one file.

    names    attributes of the options that name an output file
    inputs   name of an option -> the input file that it names
    """
    outputs = {f"--{name.replace('_', '-')}": path for name in names if (path := getattr(options, name)) is not None}
    reasons = [f"{option}: {reason}" for option, path in outputs.items() if (reason := why_not_writable(path))]
    reasons.append(why_not_distinct(outputs, inputs))
    if options.plot is not None and (reason := why_no_folder(options.plot)):
        reasons.append(f"--plot: {reason}")
    if found := next(filter(None, reasons), None):
        parser.error(found)
