"""Measure this package on a GPU against its goals.

    python -m batch_manager.tools.gpu_report --out FOLDER                      everything, within 8 minutes
    python -m batch_manager.tools.gpu_report --out FOLDER --goal G1 G3         only these goals
    python -m batch_manager.tools.gpu_report --out FOLDER --goal settings      only the launch settings of kernels
    python -m batch_manager.tools.gpu_report --out FOLDER --peers PEERS        compare with the peers in PEERS
    python -m batch_manager.tools.gpu_report --out FOLDER --rates LINES        with the rates of an earlier report
    python -m batch_manager.tools.gpu_report --dry-run                         everything, on a CPU

First, the program measures the rates of copying memory, reading memory and multiplying matrices. It then compares
the results of every kernel with its oracle, and measures the goals. Each goal is a ratio of a measured number to
another number. In most goals, the other number is measured in the same run. FOLDER/gpu_report.jsonl gets one JSON
object per case of a goal, as soon as the case is measured. FOLDER/gpu_report.md has the same cases as a table. Both
files also have the cases that were not reached, with the reason. FOLDER/gpu_settings.md has the fastest launch
settings of the kernels, as code.

Each section of the report has a time budget, which is printed before the first section. If `--minutes` is less than
their sum, the sections run in order until the time is over. The engines of the goals
capture CUDA graphs. In the time that is left after all goals, the engines run again without graphs, and launch settings
are compared. A dry run charges estimated times to the budgets, not elapsed times, so it shows whether every goal
is reached.

The folder PEERS may have `attention.py` (another attention kernel; see attention_peer.py). PEERS may also have results
of other engines for the workload FOLDER/headline.json, in the format of batch_manager.tools.bench.

Exit status 0: nothing failed, whether goals are met or not; 1: something failed; 2: nothing can be measured here.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser
from ..provenance import commit_of_the_checkout, versions
from .goals import GOALS, family

LINES, TABLE = "gpu_report.jsonl", "gpu_report.md"
PACKAGES = ("torch", "triton", "transformers", "numpy")
HARD_STOP_SECONDS = 60.0       # after the time limit, in case the device hangs or a section ignores its deadline


def run(bench: Any, minutes: float) -> Iterator[Any]:
    """Run the sections of the report that the chosen goals need, and yield their records.

    An exception ends only its section. The goals that the section has not reported yet get a record with the reason.
    """
    from .bench import OutOfTimeError
    from .records import FAILED, NOT_REACHED, Record
    from .sections import SECTIONS, plan

    chosen = [section for section in SECTIONS if section.runs_for(bench)]
    times, began, wrong = plan(chosen, minutes), bench.now, []
    print(plan_text(times), file=sys.stderr, flush=True)
    for section in chosen:
        started = bench.now
        budget, latest_end = times[section.name]
        # A dry run also runs the sections without a budget, for which no time may be left.
        bench.deadline = float("inf") if bench.is_dry and not budget else began + latest_end
        wanted = [name for name in GOALS if family(name) in section.goals and bench.wants(family(name))]
        seen = set()
        status, reason = None, ""
        try:
            for record in section.run(bench):
                seen.add(record.goal)
                if record.goal == "correctness" and record.status == FAILED:
                    wrong.append(record.case)
                yield without_judgement(record, wrong) if record.goal in GOALS else record
        except OutOfTimeError as error:
            status, reason = NOT_REACHED, f"{section.name}: {error}"
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            lines = str(error).strip().splitlines()
            status, reason = FAILED, f"{section.name}: {type(error).__name__}: {lines[0] if lines else ''}"[:300]
        if status is not None:
            for goal in [name for name in wanted if name not in seen] or ([] if wanted else ["fact"]):
                yield Record(goal, section.name, status=status, note=reason)
            if wanted and seen:
                yield Record("fact", section.name, status=status, note=reason)
        print(f"-- {section.name}: {bench.now - started:.1f} s of {budget:.0f} s", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):             # of a lost device: the table is still written
            bench.clock.forget()


def plan_text(times: dict[str, tuple[float, float]]) -> str:
    """Format the result of `sections.plan`, one line per section."""
    lines = [f"{name:<22} {f'{budget:4.0f} s' if budget else 'what is left':<13} ends by {end:4.0f} s"
             for name, (budget, end) in times.items()]
    return "\n".join(["time budgets:", *lines])


def without_judgement(record: Any, wrong: list[str]) -> Any:
    """Return the record, with judged=False if there are wrong kernels, because a wrong kernel may be fast.

    wrong   names of the kernels with wrong results
    """
    if not wrong:
        return record
    return dataclasses.replace(record, judged=False, note=f"wrong kernels: {', '.join(wrong)}; {record.note}")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m batch_manager.tools.gpu_report", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="folder for the report; created if missing; a dry run needs none")
    add("--goal", nargs="+", choices=sorted({family(name) for name in GOALS} | {"facts"}), default=[],
        help="goals to measure (all)")
    add("--peers", type=Path, help="folder of peers")
    add("--minutes", type=float, default=8.0, help="time limit in minutes (8)")
    add("--device", default="cuda", help='"cuda", "cuda:1" (cuda)')
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="data type of kernels and engines (bfloat16); a dry run uses float32")
    add("--rates", type=Path, help=f"{LINES} of an earlier report of this device; its rates are not measured again")
    add("--commit", help="commit of the measured code (from git)")
    add("--dry-run", action="store_true", help="run every line on a CPU, in Triton's interpreter; numbers are null")
    options = parser.parse_args(argv)
    if options.out is None and not options.dry_run:
        parser.error("--out is missing")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.out is None:
        with tempfile.TemporaryDirectory() as out:
            return report(options, Path(out))
    return report(options, options.out)


def report(options: argparse.Namespace, out: Path) -> int:
    """Write the report to the folder `out`, and return the exit status."""
    if options.dry_run:
        from .dry_run import dry_graphs, interpret_kernels

        try:
            interpret_kernels()
        except RuntimeError as error:
            print(f"gpu_report: {error}", file=sys.stderr)
            return 2
    import torch

    from ...triton_kernels.dispatch import use_triton
    from .bench import Bench
    from .denominators import rates_of
    from .device_clock import DryClock, GpuClock
    from .records import FAILED, Record, check, table

    if not options.dry_run and not torch.accelerator.is_available():
        print("gpu_report: torch finds no GPU; expected one; --dry-run works without", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else options.device)
    if not use_triton(device):
        print("gpu_report: triton is not installed; the kernels need it; install it", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(60 * options.minutes + HARD_STOP_SECONDS, exit=True)
    clock = DryClock(device) if options.dry_run else GpuClock(device)
    rates = {}
    if options.rates is not None:
        try:
            rates = rates_of(options.rates, clock.name)
        except (OSError, ValueError) as error:
            print(f"gpu_report: --rates: {error}", file=sys.stderr)
            return 2
    header = {"device": clock.name, "versions": versions(*PACKAGES),
              "commit": options.commit or commit_of_the_checkout(),
              "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    lines = []
    with tempfile.TemporaryDirectory() as folder, (out / LINES).open("w") as file, torch.inference_mode(), \
            dry_graphs() if options.dry_run else torch.get_device_module(device).device(device):
        dtype = torch.float32 if options.dry_run else getattr(torch, options.dtype)
        bench = Bench(clock, dtype, Path(folder), out, options.peers, goals=tuple(options.goal), rates=rates)
        for record in run(bench, options.minutes):
            line = record.line(header, dry=options.dry_run)
            try:
                check(line)
            except ValueError as error:                      # the later goals are still measured
                line = Record(record.goal, record.case, status=FAILED, note=str(error)[:300]).line(
                    header, dry=options.dry_run)
            lines.append(line)
            print(json.dumps(line), file=file, flush=True)
            print(f"{line['goal']} {line['case']}: {line['status']} {line['ratio'] or ''} {line['note']}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    (out / TABLE).write_text(table(lines) + "\n")
    print(table(lines))
    return 1 if any(line["status"] == FAILED for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(main())
