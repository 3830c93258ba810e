"""T11: the first quarter of an hour on a GPU: all tests and measurements that fit, the most useful first.

    python -m tests.first_quarter --prepare .first        on a machine with a package registry, before the GPU is there
    python3 -m tests.first_quarter --call 1 --prepared .first --out $OUT --commit COMMIT      on the GPU; then call 2
    python -m tests.first_quarter --dry-run               both calls on a CPU, with the packages of this Python

Run the program in the root of the repository. Each step of a call is a process of its own with a time limit, and a step
that fails costs only itself; steps.py has the table. After each step, OUT/results.tar.xz gets the logs and files of all
steps so far, and OUT/steps.txt how each ended. Call 1 ends by itself after 500 s, and call 2 after 240 s.

--prepare makes what a call may take along, in the folder: wheels that the GPU machine lacks, and kernels compiled
ahead. Its environment has the packages of that machine; then both calls run in it on a CPU.

On two busy cores of an AMD EPYC (2026-11-28), the environment took one minute and the kernels six. A dry run took nine,
and less than three of processor time.

Exit status 0: all steps succeeded; 1: one did not; 2: an argument is wrong.
"""

import argparse
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from .runner import Runner
from .steps import CALL_SECONDS, COMMIT, PREPARED, PYTHON, ROOT, STEPS

KERNELS = "kernels.tar.xz"               # in the folder of --prepare: a Triton cache
CUDA_PROGRAMS = ("/usr/local/cuda/bin", "/usr/local/nvidia/bin")       # of compute-sanitizer and nvidia-smi
# Triton's cache depends on these variables.
TRITON_VARIABLES = {"TRITON_DEFAULT_FP_FUSION": "1"}


def environment(scratch: Path, prepared: Path | None, *, is_dry: bool) -> dict[str, str]:
    """Unpack what was prepared, link the kernels if the checkout came without the link, and return the environment
    variables of the steps.

    What cannot be unpacked is printed: the steps do what they can without it. A dry run unpacks nothing, because its
    Python has all packages.

    scratch   folder for the unpacked files
    """
    site, cache = scratch / "site", scratch / "cache"
    for path in sorted(prepared.iterdir()) if prepared is not None and not is_dry else ():
        try:
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(site)
            elif path.name == KERNELS:
                unpack_kernels(path, cache)
        except Exception as error:
            print(f"{path} cannot be unpacked: {type(error).__name__}: {error}", flush=True)
    link = ROOT / "batch_manager" / "triton_kernels"
    if not link.exists():
        link.symlink_to(Path("..") / "triton_kernels")
    folders = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **TRITON_VARIABLES, "TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *CUDA_PROGRAMS])}


def unpack_kernels(archive: Path, cache: Path) -> None:
    """Unpack a Triton cache. Its lists of files have absolute paths, which become those of the new folder."""
    with tarfile.open(archive) as kernels:
        kernels.extractall(cache, filter="data")
    for path in cache.glob("*/__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        path.write_text(json.dumps({"child_paths": {name: str(path.parent / name) for name in names}}))


def run_call(number: int, out: Path, seconds: float | None, prepared: Path | None, commit: str | None, *,
             is_dry: bool) -> bool:
    """Run the steps of a call, and return whether all succeeded. The arguments are those of the program."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="first_quarter_") as folder:
        scratch = Path(folder)
        values = {PYTHON: [sys.executable], COMMIT: ["--commit", commit] if commit else [],
                  PREPARED: [str(prepared)] if prepared else []}
        runner = Runner(out, scratch / "results", scratch / "cache", environment(scratch, prepared, is_dry=is_dry),
                        values, began, None if is_dry else seconds, is_dry=is_dry)
        return runner.run([step for step in STEPS if step.call == number])


def _interrupt(*given: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.first_quarter", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=Path, metavar="FOLDER", help="make what a call takes along, and dry-run all")
    what.add_argument("--call", type=int, choices=sorted(CALL_SECONDS), help="run the steps of this call")
    what.add_argument("--dry-run", action="store_true", help="run both calls on a CPU; nothing has a time limit")
    add("--environment", type=Path, help="with --prepare: folder of the virtual environment (FOLDER-environment)")
    add("--out", type=Path, help="folder for the archive and the list of steps; a dry run needs none")
    add("--prepared", type=Path, help="folder that --prepare made")
    add("--seconds", type=float, help=f"time limit of the call ({CALL_SECONDS[1]} and {CALL_SECONDS[2]})")
    add("--commit", help="commit of the checkout, if git is missing")
    options = parser.parse_args(argv)
    if options.prepare is not None:
        from .prepare import prepare

        return prepare(options.prepare, options.environment)
    signal.signal(signal.SIGTERM, _interrupt)
    if options.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            out = options.out or Path(folder)
            done = [run_call(number, out / f"call-{number}", None, options.prepared, options.commit, is_dry=True)
                    for number in CALL_SECONDS]
        return 0 if all(done) else 1
    if options.out is None:
        parser.error("--out is missing")
    if options.prepared is not None and not options.prepared.is_dir():
        parser.error(f"--prepared is {options.prepared}; expected the folder that --prepare made")
    seconds = options.seconds or CALL_SECONDS[options.call]
    return 0 if run_call(options.call, options.out, seconds, options.prepared, options.commit, is_dry=False) else 1


if __name__ == "__main__":
    sys.exit(main())
