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

FOLDER gets two files. gpu_report.jsonl has one JSON object per case of a goal, as soon as the case is measured.
gpu_report.md has the same cases as a table, and the fastest launch settings of the kernels as code; it is written anew
after each section. Both have the cases that were not reached, too, with the reason.

Each section has a time budget. If `--minutes` is less than their sum, the sections run in order until the time is over.
The engines capture CUDA graphs; the sections whose names end with -eager measure again without. A dry run charges
estimated times to the budgets, not elapsed times, so it shows whether every goal is reached.

The folder PEERS may have `attention.py` (another attention kernel; see attention_peer.py). PEERS may also have results
of other engines for the headline workload, which `--workload headline.json` writes, in the format of
batch_manager.tools.bench.

Exit status 0: nothing failed, whether goals are met or not; 1: something failed; 2: nothing can be measured here.

The sections and their time budgets:

"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.provenance import commit_of_the_checkout, versions

from .sections import SECTIONS, chosen, listed

LINES, TABLE = "gpu_report.jsonl", "gpu_report.md"
PACKAGES = ("torch", "triton", "transformers", "numpy")
DEVICE_SECONDS = 60.0          # limit for the device to say its name


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tests.benchmarks.gpu_report", description=f"{__doc__}{listed()}")
    add = parser.add_argument
    add("--out", type=Path, help="folder for the report; created if missing; a dry run needs none")
    add("--section", nargs="+", choices=[section.name for section in SECTIONS], default=[], metavar="NAME",
        help="sections to run (all); the section rates runs before them, unless --rates is given")
    add("--peers", type=Path, help="folder of peers")
    add("--minutes", type=float, default=8.0, help="time limit in minutes (8)")
    add("--device", default="cuda", help='"cuda", "cuda:1" (cuda)')
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="data type of kernels and engines (bfloat16); a dry run uses float32")
    add("--rates", type=Path, help=f"{LINES} of an earlier report of this device; its rates are not measured again")
    add("--commit", help="commit of the measured code (from git)")
    add("--workload", type=Path, help="write the headline workload to this file, and exit")
    add("--dry-run", action="store_true", help="run every line on a CPU, in Triton's interpreter; numbers are null")
    options = parser.parse_args(argv)
    if options.out is None and not options.dry_run and options.workload is None:
        parser.error("--out is missing")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.workload is not None:
        from .headline import headline_workload

        options.workload.write_text(json.dumps(headline_workload()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            return report(options, options.out or Path(folder), Path(folder))
        except (OSError, RuntimeError, ValueError) as error:
            print(f"gpu_report: {error}", file=sys.stderr)
            return 2


def report(options: argparse.Namespace, out: Path, folder: Path) -> int:
    """Write the report to the folder `out`, and return the exit status.

    Raises RuntimeError if nothing can be measured, and OSError or ValueError if --rates cannot be used.

    folder   a temporary folder
    """
    from .dry_run import interpret_kernels

    if options.dry_run:
        interpret_kernels()
    import torch

    from .bench import Bench
    from .denominators import rates_of
    from .device_clock import DryClock, GpuClock
    from .processes import in_a_process, run
    from .records import FAILED, read, table

    device = torch.device("cpu" if options.dry_run else options.device)
    clock = DryClock(device) if options.dry_run else GpuClock(device)
    problem = in_a_process(lambda: _look_at(clock, folder), DEVICE_SECONDS) or (folder / "problem").read_text()
    if problem:
        raise RuntimeError(f"the GPU cannot be used: {problem}; --dry-run works without one")
    header = {"device": (folder / "device").read_text(), "versions": versions(*PACKAGES),
              "commit": options.commit or commit_of_the_checkout(),
              "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    rates = {} if options.rates is None else rates_of(read(options.rates), header["device"])
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(clock, torch.float32 if options.dry_run else getattr(torch, options.dtype), folder, options.peers,
                  rates=rates)
    lines: list[dict[str, Any]] = []
    for lines in run(bench, chosen(options.section, has_rates=bool(rates)), options.minutes, header, out / LINES):
        (out / TABLE).write_text("\n\n".join([table(lines), *bench.texts()]) + "\n")
    print((out / TABLE).read_text())
    return 1 if any(line["status"] == FAILED for line in lines) else 0


def _look_at(clock: Any, folder: Path) -> None:
    """Write the name of the device to the file `device` of the folder, or to the file `problem` why it cannot be used.
    """
    import torch

    from batch_manager.triton_kernels.dispatch import use_triton

    problem = ""
    if not clock.is_dry and not torch.accelerator.is_available():
        problem = "torch finds no GPU; expected one"
    elif not use_triton(clock.device):
        problem = "triton is not installed; the kernels need it; install it"
    else:
        (folder / "device").write_text(clock.name)
    (folder / "problem").write_text(problem)


if __name__ == "__main__":
    raise SystemExit(main())
