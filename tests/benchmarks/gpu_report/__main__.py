"""Measure this package on a GPU against its goals.

    python -m tests.benchmarks.gpu_report --out FOLDER                                  everything, within 8 minutes
    python -m tests.benchmarks.gpu_report --out FOLDER --section headline profile       only these sections
    python -m tests.benchmarks.gpu_report --out FOLDER --rates LINES                    with earlier rates
    python -m tests.benchmarks.gpu_report --out FOLDER --peers PEERS                    with the peers in PEERS
    python -m tests.benchmarks.gpu_report --dry-run                                     everything, on a CPU

The report has sections. Each runs in a process of its own, in the order below, until the time is over. A section that
fails, or hangs and is killed at its limit, costs only itself. The first section measures the rates of copying memory,
reading memory and multiplying matrices, the second compares the results of every kernel with its oracle, and the others
measure the goals. Each goal is a ratio of a measured number to another number. In most goals, the other number is
measured in the same run.

FOLDER gets two files, and must not have those of an earlier report. gpu_report.jsonl has one JSON object per case of a
goal, as soon as the case is measured. gpu_report.md has the same cases as a table, and the fastest launch settings of
the kernels as code; it is written anew after each section. Both have the cases that were not reached, too, with the
reason.

Each section has a time budget. If `--minutes` is less than their sum, the sections run in order until the time is over.
The engines capture CUDA graphs; the sections whose names end with -eager measure again without. A dry run charges
estimated times to the budgets, not elapsed times, so it shows whether every goal is reached.

The folder PEERS may have `attention.py` (another attention kernel; see attention_peer.py). PEERS may also have results
of other engines for the headline workload, which `--workload headline.json` writes, in the format of
batch_manager.tools.bench.

Exit status 0: nothing failed, whether goals are met or not; 1: something failed; 2: nothing can be measured here,
or an argument is wrong; 130: Ctrl-C.

The sections and their time budgets:

"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batch_manager.tools.command_parser import CommandParser, within
from batch_manager.tools.output_file import output_file
from batch_manager.tools.provenance import commit_of_the_checkout, versions
from tests.harness.command_line import OptionError, make_folder, refuse_without_effect, some_path, some_text

from .sections import SECTIONS, WITH_PEERS, chosen, listed

LINES, TABLE = "gpu_report.jsonl", "gpu_report.md"
PACKAGES = ("torch", "triton", "transformers", "numpy")
DEVICE_SECONDS = 60.0          # limit for the device to say its name
MINUTES, DEVICE, DTYPE = 8.0, "cuda", "bfloat16"


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tests.benchmarks.gpu_report", description=f"{__doc__}{listed()}")
    add = parser.add_argument
    add("--out", type=some_path, help="folder for the report, without an earlier one; a dry run needs none")
    add("--section", nargs="+", action="extend", choices=[section.name for section in SECTIONS], metavar="NAME",
        help="sections to run (all); the section rates runs before them, unless --rates is given")
    add("--peers", type=some_path, help="folder of peers")
    add("--minutes", type=within(0.01, 1440), help=f"time limit in minutes ({MINUTES:g})")
    add("--device", type=some_text, help=f'"cuda", "cuda:1" ({DEVICE})')
    add("--dtype", choices=("bfloat16", "float16", "float32"),
        help=f"data type of kernels and engines ({DTYPE}); a dry run uses float32")
    add("--rates", type=some_path, help=f"{LINES} of an earlier report of this device, for its rates")
    add("--commit", type=some_text, help="commit of the measured code (from git)")
    add("--workload", type=some_path, help="write the headline workload to this file, and exit")
    add("--dry-run", action="store_true", help="run every line on a CPU, in Triton's interpreter; numbers are null")
    options = parser.parse_args(argv)
    if options.workload is not None:
        if options.dry_run:
            parser.error("--dry-run has no effect with --workload; leave it out")
        refuse_without_effect(parser, options, "with --workload", (
            "out", "section", "peers", "minutes", "device", "dtype", "rates", "commit"))
    elif options.dry_run:
        refuse_without_effect(parser, options, "with --dry-run", ("device", "dtype"))
    elif options.out is None:
        parser.error("--out is missing")
    if options.section and not set(options.section) & set(WITH_PEERS):
        refuse_without_effect(parser, options, f"without one of the sections {', '.join(WITH_PEERS)}", ("peers",))
    peers = options.peers
    if peers is not None and not (os.path.isdir(peers) and [*peers.glob("attention.py"), *peers.glob("*.json")]):
        parser.error(f"--peers is {peers}, which has no attention.py and no *.json; expected a folder of peers; "
                     "name it, or leave the option out")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if options.workload is not None:
                _usable("--workload", options.workload, lambda: _write_workload(options.workload))
                return 0
            return report(options, options.out or Path(folder), Path(folder))
        except (OptionError, OSError, RuntimeError, ValueError) as error:
            print(f"gpu_report: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"gpu_report: interrupted; {LINES} has what was measured", file=sys.stderr)
            return 130


def _write_workload(path: Path) -> None:
    from .headline import headline_workload

    with output_file(path) as file:
        file.write(json.dumps(headline_workload()))


def report(options: argparse.Namespace, out: Path, folder: Path) -> int:
    """Write the report to the folder `out`, and return the exit status.

    Raises RuntimeError if nothing can be measured, and OptionError if an option cannot be used.

    folder   a temporary folder
    """
    from .dry_run import interpret_kernels
    from .records import FAILED, read, table

    make_folder("--out", out)
    for name in (LINES, TABLE):
        if (out / name).exists():
            raise OptionError(f"--out is {out}, which has {name} of an earlier report; expected a folder without; name "
                              "another one, or move the report away")
    earlier = None if options.rates is None else _usable("--rates", options.rates, lambda: read(options.rates))
    if options.dry_run:
        interpret_kernels()
    import torch

    from .bench import Bench
    from .denominators import rates_of
    from .device_clock import DryClock, GpuClock
    from .processes import in_a_process, run

    device = torch.device("cpu") if options.dry_run else _usable("--device", options.device, lambda: torch.device(
        options.device or DEVICE))
    if device.type == "cpu" and not options.dry_run:
        raise OptionError('--device is cpu; expected a GPU, such as "cuda"; --dry-run works without one')
    clock = DryClock(device) if options.dry_run else GpuClock(device)
    problem = in_a_process(lambda: _look_at(clock, folder), DEVICE_SECONDS) or (folder / "problem").read_text()
    if problem:
        raise RuntimeError(f"the GPU cannot be used: {problem}; --dry-run works without one")
    header = {"device": (folder / "device").read_text(), "versions": versions(*PACKAGES),
              "commit": options.commit or commit_of_the_checkout(),
              "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    rates = {} if earlier is None else _usable("--rates", options.rates, lambda: rates_of(earlier, header["device"]))
    (out / LINES).open("x").close()          # another program may have made it meanwhile
    bench = Bench(clock, torch.float32 if options.dry_run else getattr(torch, options.dtype or DTYPE), folder,
                  options.peers, rates=rates)
    lines: list[dict[str, Any]] = []
    sections = chosen(options.section or (), has_rates=bool(rates))
    for lines in run(bench, sections, options.minutes or MINUTES, header, out / LINES):
        (out / TABLE).write_text("\n\n".join([table(lines), *bench.texts()]) + "\n")
    print((out / TABLE).read_text())
    return 1 if any(line["status"] == FAILED for line in lines) else 0


def _usable(option: str, value: object, get: Callable[[], Any]) -> Any:
    """Return what the function returns. Raises OptionError, which names the option, if it fails."""
    expected = {"--rates": f"{LINES} of an earlier report of this device; leave the option out to measure them",
                "--workload": "a file in a folder that exists, with room on its disk",
                "--device": '"cuda", or "cuda:1" for the second GPU'}[option]
    try:
        return get()
    except (OSError, RuntimeError, ValueError) as error:
        fact = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise OptionError(f"{option} is {value}, which cannot be used: {fact}; expected {expected}") from None


def _look_at(clock: Any, folder: Path) -> None:
    """Write the name of the device to the file `device` of the folder, or to the file `problem` why it cannot be used.
    """
    import torch

    from batch_manager.triton_kernels.dispatch import use_triton

    problem = ""
    if not clock.is_dry and not torch.accelerator.is_available():
        problem = "torch finds no GPU; expected one"
    elif not clock.is_dry and (clock.device.index or 0) >= torch.accelerator.device_count():
        problem = f"--device is {clock.device}; expected one of {torch.accelerator.device_count()} GPUs, from cuda:0"
    elif not use_triton(clock.device):
        problem = "triton is not installed; the kernels need it; install it"
    else:
        (folder / "device").write_text(clock.name)
    (folder / "problem").write_text(problem)


if __name__ == "__main__":
    raise SystemExit(main())
