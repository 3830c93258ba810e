"""Map options of TensorRT-LLM's gptManagerBenchmark to options of this program, or refuse them with a reason."""

import argparse
from collections.abc import Sequence
from textwrap import wrap

WIDTH = 118

# Option of gptManagerBenchmark -> option of this program, if the names differ. The last two are of vllm bench serve.
ALIASES = {
    "engine-dir": "model",
    "dataset": "workload",
    "scheduler-policy": "policy",
    "max-num-samples": "num-requests",
    "max-prompt-len": "max-input-tokens",
    "enable-kv-cache-reuse": "block-reuse",
    "enable-chunked-context": "chunked-context",
    "num-prompts": "num-requests",
    "max-concurrency": "concurrency",
}

# Options with another meaning or another default in this program.
DIFFERENCES = {
    "type": "IFB is InflightFusedBatching, UIFB is InflightBatching",
    "dataset": "reads files of batch-manager workload, texts and traces, too",
    "max_batch_size": "default: 32",
    "max_num_tokens": "default: 512",
    "enable_chunked_context": "default: on, except for V1",
    "streaming": "default: on, except for V1 and beams",
    "exclude_input_in_output_seq": "default: on",
    "warm_up": "full batches with their own prompts (default: 1), not copies of the first sample (2)",
    "request_rate": "a Poisson process unless --delays is constant; default: the arrival times of the workload; "
                    "all at once: 0, or -1 under this name",
    "enable_exp_delays": "on by default: --delays exponential; =false is --delays constant",
    "random_seed": "default: 0",
    "log_level": "default: warning",
}

REFUSED = {
    "decoder-engine-dir": "there is one model, a decoder; name it with --model",
    "encoder-engine-dir": "encoder-decoder models are not supported; name a decoder with --model",
    "cross-kv-cache-fraction": "encoder-decoder models are not supported",
    "lora-dir": "use --lora-modules and --max-loras",
    "lora-host-cache-bytes": "use --lora-modules and --max-loras",
    "lora-num-device-mod-layers": "use --lora-modules and --max-loras",
    "medusa-choices": "speculative decoding is not supported",
    "eagle-choices": "speculative decoding is not supported",
    "eagle-posterior-threshold": "speculative decoding is not supported",
    "eagle-use-dynamic-tree": "speculative decoding is not supported",
    "eagle-dynamic-tree-max-top-k": "speculative decoding is not supported",
    "lookahead-config": "speculative decoding is not supported",
    "kv-dont-onboard-blocks": "blocks in host memory are always copied to the device before use",
    "gpu-weights-percent": "all weights stay on the device",
    "dump-profile": "layers are not profiled; use --trace and batch-manager trace",
    "wait-sleep": "the last response wakes the program, so it does not poll",
    "multi-block-mode": "there is no such switch",
    "enable-context-fmha-fp32-acc": "there is no such switch",
    "enable-batch-size-tuning": "the batch size is fixed while the engine runs; set --max-batch-size",
    "enable-max-num-tokens-tuning": "the token budget is fixed while the engine runs; set --max-num-tokens",
    "cuda-graph-mode": "use --cuda-graphs",
    "cuda-graph-cache-size": "the number of graphs is not limited",
}
VALUES = {"--enable-exp-delays": "--delays=exponential", "--no-enable-exp-delays": "--delays=constant"}
ALL_AT_ONCE = ["--request_rate", "-1"]        # the original's default; --request-rate, of this program, has 0 for it
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def rewritten(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments with the option names of this program.

    Replaces _ with - in names, replaces names of gptManagerBenchmark with this program's names, and writes `--flag` for
    `--flag=true` and `--no-flag` for `--flag=false`. For an unsupported option of gptManagerBenchmark, the parser
    prints an error and ends the program.
    """
    flags = {option for action in parser._actions if action.nargs == 0 for option in action.option_strings}
    out = []
    for before, argument in zip(["", *argv], argv):
        if not argument.startswith("--"):
            out.append("0" if [before, argument] == ALL_AT_ONCE else argument)
            continue
        if argument == "=".join(ALL_AT_ONCE):
            argument = "--request-rate=0"
        name, equals, value = argument.partition("=")
        name = _own_name(name.replace("_", "-"))
        if reason := REFUSED.get(name.removeprefix("--")):
            parser.error(f"{argument.partition('=')[0]} of gptManagerBenchmark is not supported: {reason}")
        if name in VALUES and (not equals or value.lower() in TRUTHS):
            is_on = (TRUTHS[value.lower()] if equals else True) is (name == "--enable-exp-delays")
            out.append(VALUES["--enable-exp-delays" if is_on else "--no-enable-exp-delays"])
        elif equals and name in flags and value.lower() in TRUTHS:
            negated = f"--no-{name.removeprefix('--')}"
            if TRUTHS[value.lower()]:
                out.append(name)
            elif negated in flags:
                out.append(negated)
        else:
            out.append(name + equals + value)
    return out


def _own_name(name: str) -> str:
    """Translate an option of gptManagerBenchmark to the option of `batch-manager bench`.

    For example, --scheduler-policy becomes --policy.

    A prefix `--no-` stays: --no-enable-chunked-context becomes --no-chunked-context.
    """
    prefix = "--no-" if name.startswith("--no-") and name.removeprefix("--no-") in ALIASES else "--"
    bare = name.removeprefix(prefix)
    return prefix + ALIASES.get(bare, bare)


def help_text() -> str:
    """Return the part of --help about gptManagerBenchmark."""
    names = ", ".join(f"--{alias} is --{name}" for alias, name in ALIASES.items())
    refused = ", ".join(name.replace("-", "_") for name in REFUSED)
    width = max(map(len, DIFFERENCES))
    return "\n".join([
        *wrap("Options of TensorRT-LLM's gptManagerBenchmark are accepted, with - or _ (--max_num_sequences) and with "
              f"=true or =false. Renamed: {names}.", WIDTH, break_on_hyphens=False), "",
        "What differs from gptManagerBenchmark:", "",
        *(f"  {name:{width}}  {difference}" for name, difference in DIFFERENCES.items()), "",
        *wrap(f"Refused, each with a reason: {refused}.", WIDTH)])
