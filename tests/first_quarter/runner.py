"""Runs steps one after the other, and keeps what they found in two files that are written anew after each step.

For call 1, OUT/results-1.tar.xz has the log and the files of each step, OUT/steps-1.txt one entry per step.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.command_line import OptionError

from .steps import MINUTES, OUT, RATES, ROOT, Step

ARCHIVE, LIST = "results-{}.tar.xz", "steps-{}.txt"                 # of the call with this number
LINES = "gpu_report.jsonl"               # in the folder of each step that runs the report
NUM_RATES = 3                            # as many as gpu_report/denominators.py measures
TAIL_LINES = 12                          # of the log of a step that failed
LOG_BYTES = 4 << 20                      # so much of the end of a log is kept
ENDING_SECONDS = 3.0                     # for an interrupted step to print what it found, before it is killed
REPORT_START_SECONDS = 8.0               # until the report's own time begins
PR_SET_PDEATHSIG = 1                     # see prctl(2)
LIBRARY = ctypes.CDLL(None)


@dataclass(slots=True)
class Runner:
    """A call in progress.

    call          number of the call
    out           folder of the two files
    work          folder for the logs and files of steps
    cache         folder of compiled Triton kernels
    environment   environment variables of the steps
    values        replaced argument -> arguments
    began         value of time.monotonic() at the start of the call
    seconds       time limit of the call; None: none, and each step may take as long as it likes
    problems      first entries of the list of steps: what went wrong before
    """

    call: int
    out: Path
    work: Path
    cache: Path
    environment: dict[str, str]
    values: dict[str, list[str]]
    began: float
    seconds: float | None
    is_dry: bool = False
    problems: Sequence[str] = ()

    def run(self, steps: Sequence[Step]) -> bool:
        """Run the steps, and return whether all succeeded. KeyboardInterrupt ends the step, and is raised again."""
        self.work.mkdir(parents=True, exist_ok=True)
        entries = list(self.problems)
        try:
            return self._run_all(steps, entries)
        except KeyboardInterrupt:
            self._keep([*entries, f"interrupted at {self._now():.0f} s"], with_archive=True)
            raise

    def _run_all(self, steps: Sequence[Step], entries: list[str]) -> bool:
        """Run the steps, append their entries, and return whether all succeeded."""
        latest_end, succeeded = 0.0, True
        for step in steps:
            latest_end += step.limit
            left = None if self.seconds is None else min(latest_end, self.seconds) - self._now()
            if left is not None and left < step.expected / 2:
                entry, ok = f"{step.name}: not run, {max(left, 0):.0f} s were left; expected {step.expected} s", False
            else:
                self._keep([*entries, f"{step.name}: running since {self._now():.0f} s"])
                try:
                    entry, ok = self._run(step, left)
                except OSError as error:                   # of the temporary folder, which may be full
                    entry, ok = f"{step.name}: FAILED: {error}", False
            entries.append(entry)
            succeeded &= ok
            print(entry, flush=True)
            self._keep(entries, with_archive=True)
        return succeeded

    def _now(self) -> float:
        """Return the seconds since the start of the call."""
        return time.monotonic() - self.began

    def _run(self, step: Step, seconds: float | None) -> tuple[str, bool]:
        """Run a step, and kill it and its children after `seconds`. Return its entry and whether it succeeded."""
        folder, log, began = self.work / step.name, self.work / f"{step.name}.log", self._now()
        folder.mkdir(parents=True, exist_ok=True)
        num_kernels = self._num_kernels()
        minutes = max(step.limit if seconds is None else seconds - REPORT_START_SECONDS, 1) / 60
        values = {**self.values, OUT: [str(folder)], MINUTES: [f"{minutes:.2f}"], RATES: self._rates()}
        command = [one for argument in (step.dry if self.is_dry else step.command)
                   for one in values.get(argument, [argument])]
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=self.environment | ({} if self.is_dry else dict(step.environment)),
                    stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    preexec_fn=_end_with_the_parent if sys.platform == "linux" else None)
            except OSError as error:
                return f"{step.name}: not run, {command[0]} cannot be started: {error}", False
            try:
                status = _status(process, seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):        # processes that it left would keep the GPU busy
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        _shorten(log)
        compiled = self._num_kernels() - num_kernels
        limits = "" if self.is_dry else f" of {step.limit} s, expected {step.expected} s"
        entry = (f"{step.name}: {status}, {self._now() - began:.0f} s{limits}, ended at {self._now():.0f} s"
                 f"{f', {compiled} kernels compiled' if compiled else ''}")
        if status == "ok":
            return entry, True
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n    ".join([entry, *tail]), False

    def _rates(self) -> list[str]:
        """Return the arguments with the rates of the GPU that an earlier step measured, if there is one."""
        for path in sorted(self.work.glob(f"*/{LINES}")):
            if _has_rates(path):
                return ["--rates", str(path)]
        return []

    def _num_kernels(self) -> int:
        return sum(1 for _ in self.cache.rglob("*.cubin"))

    def _keep(self, entries: Sequence[str], *, with_archive: bool = False) -> None:
        """Write the list of steps and, if asked for, the archive. A file is replaced at once, so that it is whole.

        What cannot be written is printed, and the next steps run.
        """
        try:
            made = self.work.with_suffix(".txt")
            made.write_text("\n".join(entries) + "\n")
            _replace(made, self.out / LIST.format(self.call))
            if with_archive:
                made = self.work.with_suffix(".tar.xz")
                with tarfile.open(made, "w:xz", preset=1) as archive:
                    archive.add(self.work, "results")
                _replace(made, self.out / ARCHIVE.format(self.call))
        except (OSError, tarfile.TarError) as error:
            print(f"the results could not be written: {error}", flush=True)


def claim(out: Path, call: int) -> None:
    """Make the list of steps of a call, before the first step, so that no other program writes the same files.

    Raises OptionError if the folder has files of this call.
    """
    for name in (ARCHIVE.format(call), LIST.format(call)):
        if (out / name).exists():
            raise OptionError(f"--out is {out}, which has {name} of an earlier call {call}; expected a folder without; "
                              "name another one, or move the file away")
    with contextlib.suppress(FileExistsError), (out / LIST.format(call)).open("x"):
        return
    claim(out, call)                                       # another program made it meanwhile


def _end_with_the_parent() -> None:
    LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _replace(made: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)       # it may have been removed meanwhile
    part = target.with_suffix(".part")                     # the target may be on another file system
    shutil.copyfile(made, part)
    part.replace(target)


def _status(process: subprocess.Popen, seconds: float | None) -> str:
    """Wait until the process ends, interrupt it shortly before its limit, and return how it ended."""
    try:
        code = process.wait(None if seconds is None else max(seconds - ENDING_SECONDS, 0.1))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        return "FAILED: ended at its limit"
    if code < 0:
        return f"FAILED with {signal.Signals(-code).name}"
    return f"FAILED with status {code}" if code else "ok"


def _has_rates(path: Path) -> bool:
    """Return whether the report has all rates of the GPU, and ends with a whole line, so that it can be read."""
    text, measured = path.read_text(errors="replace"), 0
    for line in text.splitlines():
        with contextlib.suppress(ValueError):              # the last line of a step that was killed
            record = json.loads(line)
            measured += record.get("goal") == "denominator" and record.get("status") == "measured"
    return measured >= NUM_RATES and text.endswith("\n")


def _shorten(log: Path) -> None:
    if log.stat().st_size > LOG_BYTES:
        with log.open("rb") as file:
            file.seek(-LOG_BYTES, os.SEEK_END)
            end = file.read()
        log.write_bytes(b"(the beginning was left out)\n" + end)

