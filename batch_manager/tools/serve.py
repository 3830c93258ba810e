"""Serve OpenAI's HTTP API for one model.

    batch-manager serve MODEL --port 8000

The application is `batch_manager.extras.openai.application.make_app`, which other ASGI servers can run too.
"""

import sys
from collections.abc import Sequence
from math import inf

from ..config import TrtGptModelOptionalParams
from ..errors import ConfigError
from ..extras.launch import LONGEST_DRAIN_S, follow, parallel_config, rank_of
from .command_parser import CommandParser, at_least
from .shared_options import add_shared

LONGEST_KEEP_ALIVE_S = 86_400
ADAPTER_OPTIONS = {"lora_modules": "modules", "max_loras": "most_on_device", "max_cpu_loras": "most_on_host",
                   "max_lora_rank": "largest_rank", "lora_root": "root"}      # option -> field of AdapterOptions


def main(argv: Sequence[str] | None = None, program: str = "batch-manager serve") -> int:
    """Run the server, and return its exit status.

    program   the command's name in messages
    """
    parser = CommandParser(prog=program, description="OpenAI's HTTP API for one model. Exit status: 2 if an option or "
                                                     "the model is refused, 1 if the start fails otherwise")
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="folder with a tokenizer, or .gguf file")
    add_shared(parser.add_argument, "--model", "instead of MODEL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (8000)")
    parser.add_argument("--served-model-name", help="the name that clients use (that of the folder or file)")
    parser.add_argument("--allowed-origins", nargs="+", default=(), metavar="ORIGIN", help="origins such as "
                        "https://example.org whose pages may call the server from a browser; *: all (none)")
    parser.add_argument("--keep-alive-seconds", type=int, default=75, help="for idle connections; above a proxy's (75)")
    parser.add_argument("--drain-seconds", type=float, help="for running requests after SIGTERM (30, and with several "
                        f"ranks at most {LONGEST_DRAIN_S})")
    for name, what in (("--tool-call-parser", "tool calls"), ("--reasoning-parser", "reasoning")):
        parser.add_argument(name, metavar="NAME", help=f"the model's format of {what}; none: text (the template's)")
    add_shared(parser.add_argument, "--block-reuse", shown="on", default=True)
    parser.add_argument("--kv-events-config", metavar="JSON", help="publish events of the prefix cache, as vLLM does, "
                        """for instance {"endpoint": "tcp://*:5557"} (off); they hold prompts""")
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="compute prompts for other servers, or take them")
    parser.add_argument("--max-queued-requests", type=int)
    parser.add_argument("--enable-lora", action="store_true", help="accept LoRA adapters; so do the options below")
    add_shared(parser.add_argument, "--lora-modules", "clients name them as model")
    parser.add_argument("--lora-root", metavar="FOLDER", help="clients may load adapters below it (they may not)")
    add_shared(parser.add_argument, "--max-loras", shown="2 %% of its free memory")
    parser.add_argument("--max-cpu-loras", type=at_least(1), metavar="N", help="and on the host (1 GiB)")
    add_shared(parser.add_argument, "--max-lora-rank", shown="64")
    for name in ("--max-batch-size", "--max-seq-len", "--num-threads", "--device", "--dtype", "--quantization",
                 "--quantized-activations", "--speculative-config", "--disk-cache-path", "--disk-cache-size",
                 "--kv-cache-dtype"):
        add_shared(parser.add_argument, name)
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        add_shared(parser.add_argument, name, shown="1", default=1)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    models = [given.pop(name) for name in ("positional", "model") if name in given]
    if len(models) != 1:
        parser.error(f"{len(models)} models were given; expected one folder or .gguf file")
    sizes = given.pop("tensor_parallel_size"), given.pop("pipeline_parallel_size")
    longest_drain_s = inf if sizes == (1, 1) else LONGEST_DRAIN_S
    host, port, keep_alive_s = map(given.pop, ("host", "port", "keep_alive_seconds"))
    drain_s = given.pop("drain_seconds", min(30.0, longest_drain_s))
    if not 0 <= port <= 65535:
        parser.error(f"--port is {port}; expected 0 to 65535; 0 takes any free port")
    if not drain_s >= 0:                             # also refuses nan
        parser.error(f"--drain-seconds is {drain_s}; expected at least 0; 0 ends running requests at once")
    if drain_s > longest_drain_s:
        parser.error(f"--drain-seconds is {drain_s} with several ranks; expected at most {LONGEST_DRAIN_S}, because "
                     "torchrun ends its processes 30 seconds after SIGTERM; lower it")
    if not 1 <= keep_alive_s <= LONGEST_KEEP_ALIVE_S:
        parser.error(f"--keep-alive-seconds is {keep_alive_s}; expected 1 to {LONGEST_KEEP_ALIVE_S}")
    wanted = {field: value for name, field in ADAPTER_OPTIONS.items() if (value := given.pop(name, None))}
    has_adapters = given.pop("enable_lora") or wanted
    try:
        from ..extras.openai.adapters import AdapterOptions
        from ..extras.openai.application import engine_params, make_app
        from ..extras.openai.server import check_port, run
    except ImportError as error:
        print(not_installed(program, error), file=sys.stderr)
        return 1
    try:
        config = parallel_config(*sizes)
        adapters = AdapterOptions.of(**wanted) if has_adapters else None
        if rank_of(config) > 0:
            cache = {} if adapters is None else {"peft_cache_config": adapters.cache(*models)}
            fields = {"block_reuse", *engine_params.__kwdefaults__, *TrtGptModelOptionalParams.__dataclass_fields__}
            return follow(*models, engine_params(parallel_config=config, **cache, **{
                name: value for name, value in given.items() if name in fields}))
        check_port(host, port)
        app = make_app(*models, parallel_config=config, adapters=adapters, **given)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return run(app, host, port, drain_s=drain_s, keep_alive_s=keep_alive_s)


def not_installed(program: str, error: ImportError) -> str:
    return (f"{program}: {error.name} is not installed; it is part of the extra server; "
            'pip install "batch-manager[server]", or in a checkout pip install -e ".[server]"')
