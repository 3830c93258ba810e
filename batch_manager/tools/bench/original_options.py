"""The options of TensorRT-LLM's gptManagerBenchmark: which option here each of them is, and why some are refused."""

import argparse
from collections.abc import Sequence
from textwrap import wrap

WIDTH = 118

# Names of options that have another one here. The last three are those of vllm bench serve.
ALIASES = {
    "engine-dir": "model",
    "dataset": "workload",
    "scheduler-policy": "policy",
    "max-batch-size": "max-batch",
    "max-num-tokens": "max-tokens-per-step",
    "enable-kv-cache-reuse": "block-reuse",
    "enable-chunked-context": "chunked-context",
    "num-prompts": "max-num-samples",
    "max-concurrency": "concurrency",
}

# What is not the same under the same name, or has another default.
DIFFERENCES = {
    "type": "IFB is InflightFusedBatching, UIFB is InflightBatching",
    "dataset": "also files of batch-manager workload, texts and traces",
    "max_batch_size": "32 where it is not given",
    "max_num_tokens": "512 where it is not given",
    "enable_chunked_context": "on where it is not given, but for V1",
    "streaming": "on where it is not given, but for V1 and beams",
    "exclude_input_in_output_seq": "on where it is not given",
    "warm_up": "full batches of prompts of their own (1), not copies of the first sample (2)",
    "request_rate": "where it is not given, requests arrive when the workload says",
    "log_level": "warning where it is not given",
}

REFUSED = {
    "decoder-engine-dir": "there is one model, and it is no encoder with a decoder; name it with --model",
    "encoder-engine-dir": "models with an encoder and a decoder are not built; name a decoder with --model",
    "cross-kv-cache-fraction": "models with an encoder and a decoder are not built; leave it out",
    "lora-dir": "LoRA adapters are not built; leave it out",
    "lora-host-cache-bytes": "LoRA adapters are not built; leave it out",
    "lora-num-device-mod-layers": "LoRA adapters are not built; leave it out",
    "medusa-choices": "draft tokens are not built; leave it out",
    "eagle-choices": "draft tokens are not built; leave it out",
    "eagle-posterior-threshold": "draft tokens are not built; leave it out",
    "eagle-use-dynamic-tree": "draft tokens are not built; leave it out",
    "eagle-dynamic-tree-max-top-k": "draft tokens are not built; leave it out",
    "lookahead-config": "draft tokens are not built; leave it out",
    "kv-dont-onboard-blocks": "blocks in host memory are always copied back before they are used; leave it out",
    "gpu-weights-percent": "weights stay on the device; leave it out",
    "dump-profile": "there is no profile of layers; use --trace, and batch-manager trace",
    "wait-sleep": "the program is woken by the last response and does not poll; leave it out",
    "multi-block-mode": "there is no such switch; leave it out",
    "enable-context-fmha-fp32-acc": "there is no such switch; leave it out",
    "enable-batch-size-tuning": "the batch size does not change while the engine runs; set --max-batch-size",
    "enable-max-num-tokens-tuning": "the token budget does not change while the engine runs; set --max-num-tokens",
    "cuda-graph-mode": "the option is --cuda-graphs here",
    "cuda-graph-cache-size": "there is no such limit; leave it out",
}
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def rewritten(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments with - for _ in the names of options, and `--name=true` or `=false` as `--name` or `--no-name`.

    Ends the program, through the parser, where an option of the original cannot be had.
    """
    flags = {option for action in parser._actions if action.nargs == 0 for option in action.option_strings}
    out = []
    for argument in argv:
        if not argument.startswith("--"):
            out.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = _own_name(name.replace("_", "-"))
        if reason := REFUSED.get(name.removeprefix("--")):
            parser.error(f"{argument.partition('=')[0]} is an option of gptManagerBenchmark that this program does not "
                         f"have: {reason}")
        if equals and name in flags and value.lower() in TRUTHS:
            negated = f"--no-{name.removeprefix('--')}"
            if TRUTHS[value.lower()]:
                out.append(name)
            elif negated in flags:
                out.append(negated)
        else:
            out.append(name + equals + value)
    return out


def _own_name(name: str) -> str:
    """--scheduler-policy -> --policy, --no-enable-chunked-context -> --no-chunked-context"""
    prefix = "--no-" if name.startswith("--no-") and name.removeprefix("--no-") in ALIASES else "--"
    bare = name.removeprefix(prefix)
    return prefix + ALIASES.get(bare, bare)


def told() -> str:
    """Part of the text of --help."""
    names = ", ".join(f"--{alias} is --{name}" for alias, name in ALIASES.items())
    refused = ", ".join(name.replace("-", "_") for name in REFUSED)
    width = max(map(len, DIFFERENCES))
    return "\n".join([
        *wrap("Options of TensorRT-LLM's gptManagerBenchmark are taken too, with - or _ (--max_num_sequences) and with "
              f"=true or =false. Other names: {names}.", WIDTH, break_on_hyphens=False), "",
        "What differs from gptManagerBenchmark:", "",
        *(f"  {name:{width}}  {difference}" for name, difference in DIFFERENCES.items()), "",
        *wrap(f"Refused, each with its reason: {refused}.", WIDTH)])
