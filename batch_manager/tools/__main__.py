"""The program `batch-manager`, and `python -m batch_manager.tools`: the tools by short names.

A command is imported when it is called, so that the others cost nothing. Status 130: Ctrl-C.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from .._version import __version__

# command -> (module here with `main(argv) -> exit status`, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "watch": ("watch", "show in the terminal what a running engine does"),
    "inspect": ("inspect", "say what would run of a checkpoint, and what it takes in memory"),
    "bench": ("bench.__main__", "serve a workload, or sweep its load, and say how fast that was"),
    "workload": ("workload", "write a workload for bench"),
    "compare": ("compare", "say in what results of bench differ, and whether by more than their spread"),
    "simulate": ("simulate.__main__", "say what other settings, loads or more replicas would do, fitted on a trace"),
    "host-bench": ("host_bench", "time the host's work in an iteration, around a scripted model"),
    "trace": ("trace", "say from a trace where the time of a request went; write it for Perfetto or as CSV"),
    "draw": ("draw.command_line", "draw who ran in which iteration: as text, as SVG, as a page for a browser"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status; 2: there is no such command."""
    name, *arguments = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"batch-manager {__version__}")
        return 0
    if name not in COMMANDS:
        told = f"there is no command {name!r}" if name else "no command was given"
        print(f"batch-manager: {told}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return import_module(f".{COMMANDS[name][0]}", __package__).main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def run_as(name: str) -> int:
    """What `python -m batch_manager.tools.MODULE` does: the command of this name, with the arguments of the program."""
    return main([name, *sys.argv[1:]])


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}   {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: batch-manager COMMAND ...", "", *lines, "",
                      "batch-manager COMMAND --help says more. --version: of the package"])


if __name__ == "__main__":
    raise SystemExit(main())
