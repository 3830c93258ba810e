"""T11: runs all tests and measurements for the first hour on a new GPU machine, in calls of at most ten minutes.

    python -m tests.first_hour --prepare .wheels        downloads wheels, on a machine with a package registry
    python -m tests.first_hour --wheels .wheels --call 1 --out FOLDER --commit COMMIT      on the GPU; then call 2 and 3
    python -m tests.first_hour --part kernels report --out FOLDER                          runs single parts
    python -m tests.first_hour --out FOLDER --dry-run                      runs on a CPU what needs no GPU

Run the program in the root of the repository. Each part has a time limit, a log FOLDER/PART.log and a line in
FOLDER/summary.json, which is printed at the end. Before the parts, the program installs the wheels into a separate
folder, links the kernels into the package if the checkout lacks the link, and imports torch, triton and the package.
The exit status is 0 if all parts succeeded.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .parts import CALL_MINUTES, CALLS, PARTS, REQUIRED_WHEELS, ROOT, SITE, Part

# Wheels for the machine's interpreter; pip matches these numbers exactly.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux1_x86_64")
IMPORTS = ("import batch_manager, batch_manager.gpt_manager, batch_manager.triton_kernels.dispatch, torch, triton;"
           "print('torch', torch.__version__, 'triton', triton.__version__, 'batch_manager', "
           "batch_manager.__version__, torch.accelerator.is_available())")
LAST_LINES = 12


def prepare(folder: Path) -> None:
    """Download the wheels, exclude them from git if they are in the checkout, and print the command of each call."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version",
                "3.12", "--implementation", "cp", *(f"--platform={name}" for name in PLATFORMS), "-d", str(folder)]
    subprocess.run([*download, *REQUIRED_WHEELS], check=True)
    if folder.resolve().is_relative_to(ROOT):
        keep_from_git(folder.resolve().relative_to(ROOT), ROOT)
    for number, names in enumerate(CALLS, 1):
        print(f"call {number} (carry {folder}): python3 -m tests.first_hour --wheels {folder} --call {number} "
              f"--out $OUT --commit $COMMIT        # {', '.join(names)}")


def keep_from_git(folder: Path, repository: Path) -> None:
    """Add the folder to the files that git excludes in this clone, unless it is excluded already."""
    found = subprocess.run(["git", "rev-parse", "--git-path", "info/exclude"], cwd=repository, capture_output=True,
                           text=True, check=True)
    exclude, line = repository / found.stdout.strip(), f"/{folder.as_posix()}/"
    before = exclude.read_text() if exclude.exists() else ""
    if line not in before.splitlines():
        exclude.parent.mkdir(exist_ok=True)
        exclude.write_text(before + line + "\n")


def prerequisites(wheels: Path | None, link: Path = ROOT / "batch_manager" / "triton_kernels") -> dict[str, str]:
    """Install the wheels, link the kernels, and check that batch_manager can be imported.

    Returns the environment variables with which parts run. Raises RuntimeError if the wheels cannot be installed or the
    package cannot be imported.

    wheels   folder of the wheels; None: nothing is installed
    link     path of the kernels within the package
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if wheels is not None:
        files = sorted(map(str, wheels.glob("*.whl")))
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile",
                   "--no-cache-dir", "--upgrade", "--target", str(SITE), *files]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{len(files)} wheels of {wheels} were not installed: {done.stderr[-500:]}")
        path.insert(0, str(SITE))
    if not link.exists():
        link.symlink_to(Path("..") / "triton_kernels")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, cwd=ROOT, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise RuntimeError(f"the package cannot be imported: {done.stderr[-800:]}")
    print(done.stdout.strip(), flush=True)
    return environment


def run_part(part: Part, out: Path, environment: dict[str, str], seconds: float, *, is_dry: bool,
             commit: str | None = None) -> dict[str, Any]:
    """Run a part with its output in a file, kill its leftover processes, and return the part's line of the summary."""
    log, began = out / f"{part.name}.log", time.monotonic()
    line: dict[str, Any] = {"part": part.name, "what": part.text}
    try:
        command = part.command(out, is_dry=is_dry)
    except FileNotFoundError as error:
        return line | {"status": "not run", "why": str(error)}
    if commit is not None and "batch_manager.tools.gpu_report" in command:
        command += ["--commit", commit]
    with log.open("w") as file:
        variables = dict(part.environment) | dict(part.dry_environment if is_dry else ())
        process = subprocess.Popen(command, cwd=ROOT, env=environment | variables, stdout=file,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):        # leftover processes would keep the GPU busy
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    status = "ended at its limit" if code is None else "ok" if code == 0 else f"failed with status {code}"
    return line | {"status": status, "seconds": round(time.monotonic() - began, 1), "last": last}


def run(parts: Sequence[Part], out: Path, wheels: Path | None, minutes: float, *, is_dry: bool,
        commit: str | None = None) -> list[dict[str, Any]]:
    """Run the parts. Return the summary, with one line per part, including parts for which no time was left."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    environment = prerequisites(wheels)
    lines = []
    for part in parts:
        left = deadline - time.monotonic()
        if left < min(part.seconds, 30):
            lines.append({"part": part.name, "what": part.text, "status": "not run", "why": f"{left:.0f} s were left"})
        else:
            lines.append(run_part(part, out, environment, min(part.seconds, left), is_dry=is_dry, commit=commit))
        print(f"{part.name}: {lines[-1]['status']}", flush=True)
        (out / "summary.json").write_text(json.dumps(lines, indent=1))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prepare", type=Path, metavar="FOLDER", help="download wheels into the folder, print the calls, and exit")
    add("--out", type=Path, help="folder for logs and reports")
    add("--wheels", type=Path, help="folder of wheels to install first")
    add("--call", type=int, choices=range(1, len(CALLS) + 1), help="run the parts of this call")
    add("--part", nargs="+", choices=[part.name for part in PARTS], help="run these parts (all)")
    add("--minutes", type=float, default=CALL_MINUTES, help=f"time limit for all parts together ({CALL_MINUTES})")
    add("--commit", help="commit of the checkout, if git is missing")
    add("--dry-run", action="store_true", help="run on a CPU what needs no GPU")
    options = parser.parse_args(argv)
    if options.prepare is not None:
        prepare(options.prepare)
        return 0
    if options.out is None:
        parser.error("--out is missing")
    names = CALLS[options.call - 1] if options.call else options.part or [part.name for part in PARTS]
    try:
        lines = run([part for part in PARTS if part.name in names], options.out, options.wheels, options.minutes,
                    is_dry=options.dry_run, commit=options.commit)
    except RuntimeError as error:
        print(f"first_hour: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(f"\n== {line['part']}: {line['status']} ({line.get('seconds', 0)} s) {line.get('why', '')}")
        print("\n".join(line.get("last", [])))
    return 0 if all(line["status"] == "ok" for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
