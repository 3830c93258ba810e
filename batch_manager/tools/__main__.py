"""The program `batch-manager`, and `python -m batch_manager.tools`: the tools by short names.

The module of a command is imported only when the command runs. Exit status 130 means Ctrl-C.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from .._version import __version__
from .standard_output import reported

# command -> (module in this package with `main(argv) -> exit status`, help)
COMMANDS: dict[str, tuple[str, str]] = {
    "watch": ("watch.__main__", "show in the terminal what a running engine does"),
    "serve": ("serve", "serve OpenAI's HTTP API for one model"),
    "inspect": ("inspect", "show how a checkpoint would run, and its memory use"),
    "bench": ("bench.__main__", "serve a workload, or sweep its load, and report the speed"),
    "workload": ("workload", "write a workload for bench"),
    "compare": ("compare.__main__", "compare results of bench, and show which differences exceed their spread"),
    "simulate": ("simulate.__main__", "predict other settings, loads or more replicas, fitted on a trace"),
    "host-bench": ("host_bench", "time the host's work per iteration, with a scripted model"),
    "trace": ("trace", "show where the time of a request went; convert a trace for Perfetto or to CSV"),
    "draw": ("draw.command_line", "draw which request ran in which iteration: as text, SVG or an HTML page"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status, or 2 for an unknown command."""
    name, *arguments = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if name == "serve":        # it writes nothing to the standard output, and may run without one
        return _run(name, arguments)
    program = f"batch-manager {name}" if name in COMMANDS else "batch-manager"
    return reported(program, partial(_run, name, arguments))


def _run(name: str, arguments: list[str]) -> int:
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"batch-manager {__version__}")
        return 0
    if name not in COMMANDS:
        told = f"unknown command {name!r}" if name else "no command was given"
        print(f"batch-manager: {told}; expected one of {', '.join(COMMANDS)}; batch-manager --help describes them",
              file=sys.stderr)
        return 2
    try:
        return import_module(f".{COMMANDS[name][0]}", __package__).main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def run_as(name: str) -> int:
    """Run the command `name` with the arguments of this process. `python -m batch_manager.tools.MODULE` calls this."""
    return main([name, *sys.argv[1:]])


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}   {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: batch-manager COMMAND ...", "", *lines, "",
                      "batch-manager COMMAND --help describes a command; --version shows the version of the package"])


if __name__ == "__main__":
    raise SystemExit(main())
