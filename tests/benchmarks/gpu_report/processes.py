"""Run the sections of a report one after the other, each in a process of its own.

After an error such as an illegal memory access, every later call of the same process to the device fails. Such an error
therefore costs one section. The processes are forked when everything is imported, so that each of them starts at once.
The parent never uses the device: a process whose parent used it cannot use it.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from batch_manager.runtime import build_backend  # noqa: F401  (imported once, not in each process)

from .bench import Bench, OutOfTimeError
from .denominators import rates_of
from .dry_run import dry_graphs
from .goals import GOALS
from .records import FAILED, NOT_REACHED, Record, check, read
from .sections import RATES, START_SECONDS, Section, functions, plan

GRACE_SECONDS = 4.0          # after the latest end of a section, until its process is killed
DUMP_SECONDS = 1.0            # for a killed process to print what it was doing
PR_SET_PDEATHSIG = 1          # see prctl(2)


def run(bench: Bench, sections: Sequence[Section], minutes: float, header: dict[str, Any],
        path: Path) -> Iterator[list[dict[str, Any]]]:
    """Run the sections, and yield the lines of the report so far after each of them.

    Each record is a line of the file `path` as soon as it is measured. A section may raise an exception, its process
    may end, or it may be killed at its limit: then the goals that it has not reported get a record with the reason, and
    the next section runs.

    header   fields that all lines share
    """
    times, began, run_of = plan(sections, minutes), bench.now, functions()
    print(plan_text(times), file=sys.stderr, flush=True)
    path.write_text("")
    for section in sections:
        started, before = bench.now, len(bench.lines)
        budget, latest_end = times[section.name]
        # A dry run also runs the sections without a budget, for which no time may be left.
        bench.deadline = float("inf") if bench.is_dry and not budget else began + latest_end
        if not bench.rates and section.name != RATES:
            with contextlib.suppress(ValueError):
                bench.rates = rates_of(bench.lines, header["device"])
        if bench.has_time(START_SECONDS):
            spent = multiprocessing.RawValue("d", bench.now)
            problem = in_a_process(
                partial(_measure, section, run_of[section.name], bench, header, path, spent),
                None if bench.is_dry else bench.seconds_left + GRACE_SECONDS)
            bench.estimated = spent.value
            failed = FAILED, problem
        else:
            failed = NOT_REACHED, "no time was left"
        bench.lines = whole_lines(path)
        if failed[1]:
            seen = {line["goal"] for line in bench.lines[before:]}
            _write(path, header, bench.is_dry, unreported(section, seen, *failed))
            bench.lines = whole_lines(path)
        print(f"-- {section.name}: {bench.now - started:.1f} s of {budget:.0f} s", file=sys.stderr, flush=True)
        yield bench.lines


def plan_text(times: dict[str, tuple[float, float]]) -> str:
    """Format the result of `sections.plan`, one line per section."""
    lines = [f"{name:<22} {f'{budget:4.0f} s' if budget else 'what is left':<13} ends by {end:4.0f} s"
             for name, (budget, end) in times.items()]
    return "\n".join(["time budgets:", *lines])


def in_a_process(function: Callable[[], None], seconds: float | None) -> str:
    """Call the function in a forked process. Returns "" or, if the process did not end well, what happened.

    seconds   limit, after which the process prints what it is doing, and is killed; None: no limit
    """
    process = multiprocessing.get_context("fork").Process(target=_child, args=(function,), daemon=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns about threads. Those of this process are idle pools of numpy and torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(seconds)
    if process.exitcode is None:
        os.kill(process.pid or 0, signal.SIGUSR1)
        process.join(DUMP_SECONDS)
        process.kill()
        process.join()
        return f"it was killed at its limit of {seconds:.0f} s"
    code = process.exitcode
    return "" if code == 0 else f"its process ended with {signal.Signals(-code).name if code < 0 else f'status {code}'}"


def _child(function: Callable[[], None]) -> None:
    if sys.platform == "linux":                      # the process ends with its parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)     # Ctrl-C is for the parent, which ends this process
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)                                 # threads and tensors of a lost device may never end


def _measure(section: Section, function: Callable[[Bench], Iterator[Record]], bench: Bench, header: dict[str, Any],
             path: Path, spent: Any) -> None:
    """Write the records of a section and, after an exception, a record for each goal without one.

    spent   gets the value of `bench.now` at the end
    """
    seen: set[str] = set()
    wrong = [line["case"] for line in bench.lines if line["goal"] == "correctness" and line["status"] == FAILED]

    def measured() -> Iterator[Record]:
        for record in function(bench):
            seen.add(record.goal)
            yield without_judgement(record, wrong) if record.goal in GOALS else record

    with torch.inference_mode(), (dry_graphs() if bench.device.type == "cpu" else
                                  torch.get_device_module(bench.device).device(bench.device)):
        try:
            _write(path, header, bench.is_dry, measured())
        except OutOfTimeError as error:
            _write(path, header, bench.is_dry, unreported(section, seen, NOT_REACHED, str(error)))
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            _write(path, header, bench.is_dry, unreported(section, seen, FAILED, reason))
    spent.value = bench.now


def unreported(section: Section, seen: set[str], status: str, reason: str) -> list[Record]:
    """Return a record for each goal of the section that is not in `seen`, and one for the section if some are."""
    left = [goal for goal in section.goals if goal not in seen] + (["fact"] if seen else [])
    return [Record(goal, section.name, status=status, note=f"{section.name}: {reason}"[:300]) for goal in left]


def without_judgement(record: Record, wrong: list[str]) -> Record:
    """Return the record, with judged=False if there are wrong kernels, because a wrong kernel may be fast.

    wrong   names of the kernels with wrong results
    """
    if not wrong:
        return record
    return dataclasses.replace(record, judged=False, note=f"wrong kernels: {', '.join(wrong)}; {record.note}")


def _write(path: Path, header: dict[str, Any], is_dry: bool, records: Iterable[Record]) -> None:
    with path.open("a") as file:
        for record in records:
            line = record.line(header, dry=is_dry)
            try:
                check(line)
            except ValueError as error:              # the later goals are still measured
                line = Record(record.goal, record.case, status=FAILED, note=str(error)[:300]).line(header, dry=is_dry)
            print(json.dumps(line), file=file, flush=True)
            print(f"{line['goal']} {line['case']}: {line['status']} {line['ratio'] or ''} {line['note']}", flush=True)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a report, and remove a last line that a killed process did not end."""
    text = path.read_text()
    if not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    return read(path)
