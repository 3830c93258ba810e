"""Show how a checkpoint would run and how much memory it would take, without loading its weights.

    python -m batch_manager.tools.inspect FOLDER_OR_GGUF_FILE
    batch-manager inspect FOLDER --device cuda --free-memory-bytes 80000000000      # plan for another machine

If a checkpoint cannot run, the program prints the error that the engine would raise. For the package's own models, it
checks the names and shapes of all tensors against the configuration. Models of transformers and registered classes get
this check only when they are loaded. The first inspection on a CPU may compile the package's C code, as the first
engine does. All settings that are not options of this program have the defaults of GptManager.
"""

import json
import re
import sys
from collections.abc import Sequence
from functools import partial

from ..config import KvCacheConfig, TrtGptModelOptionalParams
from ..errors import BatchManagerError
from .__main__ import run_as
from .command_parser import CommandParser
from .shared_options import add_shared

DEFAULTS = TrtGptModelOptionalParams()
# Parameter of an engine -> the option of this program, for the advice in the errors of an engine.
OPTION_OF = {"KvCacheConfig.max_tokens": "--max-tokens-in-paged-kvcache", "max_num_tokens": "--max-num-tokens",
             "KvCacheConfig.free_gpu_memory_fraction": "--kv-cache-free-gpu-mem-fraction",
             "max_batch_size": "--max-batch-size", "max_seq_len": "--max-seq-len",
             "model_implementation": "--model-implementation", "quantization": "--quantization",
             "quantized_activations": "--quantized-activations", "kv_cache_dtype": "--kv-cache-dtype"}
NAMED = ("device", "dtype", "max_seq_len", "model_implementation", "quantization", "quantized_activations",
         "max_batch_size", "max_num_tokens")
PARAMETER = re.compile(rf"\b({'|'.join(map(re.escape, OPTION_OF))})\b")
# Advice on parameters that are no options of this program, or that have another form here.
REWORDED = (('device="cpu", and num_threads to limit its threads', "--device cpu"), ('device="cpu"', "--device cpu"),
            ("leave device unset", "leave --device out"), (", or pass load_format='dummy' for random weights", ""),
            ("max_num_sequences, or max_batch_size if max_num_sequences is unset", "max_batch_size"))


def advice_of(fix: str) -> str:
    """Return the way out of an engine's error with the options of this program."""
    for words, here in REWORDED:
        fix = fix.replace(words, here)
    return PARAMETER.sub(lambda match: OPTION_OF[match.group()], fix)


def main(argv: Sequence[str] | None = None) -> int:
    """Print how a checkpoint would run, or why it cannot run, and return 0 or 1."""
    parser = CommandParser(
        prog="batch-manager inspect", description=__doc__,
        epilog="exit status: 0 it can run; 1 it cannot, with these options; 2 the command line is wrong; 130 Ctrl-C")
    parser.add_argument("path", help="folder with config.json and *.safetensors, or a .gguf file")
    shared = partial(add_shared, parser.add_argument)
    shared("--device", "it need not exist with --free-memory-bytes", "cuda if available")
    shared("--dtype", shown="auto", default="auto")
    shared("--max-batch-size", shown=f"{DEFAULTS.max_batch_size}", default=DEFAULTS.max_batch_size)
    shared("--max-num-tokens", shown=f"{DEFAULTS.max_num_tokens}", default=DEFAULTS.max_num_tokens)
    shared("--max-seq-len", shown="the model's positions", type=int)
    shared("--max-tokens-in-paged-kvcache", shown="as the memory allows")
    shared("--kv-cache-free-gpu-mem-fraction", shown=f"{KvCacheConfig().free_gpu_memory_fraction}",
           default=KvCacheConfig().free_gpu_memory_fraction)
    shared("--model-implementation", shown="auto", default="auto")
    shared("--quantization", shown="as stored")
    shared("--quantized-activations", shown="exact products")
    shared("--kv-cache-dtype", shown="auto", default="auto")
    parser.add_argument("--free-memory-bytes", type=int, metavar="N", help="free memory to plan for (what is free now)")
    shared("--report", "text or one line of JSON", "text", choices=("text", "json"), default="text")
    options = parser.parse_args(argv)
    from .model_facts import described, inspect_model

    try:
        kv = KvCacheConfig(max_tokens=options.max_tokens_in_paged_kvcache, kv_cache_dtype=options.kv_cache_dtype,
                           free_gpu_memory_fraction=options.kv_cache_free_gpu_mem_fraction)
        facts = inspect_model(options.path, free_bytes=options.free_memory_bytes, kv=kv, **{
            name: getattr(options, name) for name in NAMED})
    except BatchManagerError as error:
        way_out = advice_of(error.fix)
        if options.report == "json":
            print(json.dumps({"refused": {"fact": error.fact, "expectation": error.expectation, "way_out": way_out}}))
        else:
            parts = (("cannot run: ", error.fact), ("  expected: ", error.expectation.removeprefix("expected ")),
                     ("  way out:  ", way_out))
            print("\n".join(name + text for name, text in parts if text), file=sys.stderr)
        return 1
    print(json.dumps(facts) if options.report == "json" else described(facts), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as("inspect"))
