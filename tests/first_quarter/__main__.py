"""T11: the first quarter of an hour on a GPU: all tests and measurements that fit, the most useful first.

    python -m tests.first_quarter --prepare .first        on a machine with a package registry, before the GPU is there
    python3 -m tests.first_quarter --call 1 --prepared .first --out $OUT --commit COMMIT      on the GPU; then call 2
    python -m tests.first_quarter --dry-run               both calls on a CPU, with the packages of this Python

Run the program in the root of the repository. Each step of a call is a process of its own with a time limit, and a step
that fails costs only itself; steps.py has the table. After each step of call 1, OUT/results-1.tar.xz gets the logs
and files of all its steps so far, and OUT/steps-1.txt how each ended. Call 1 ends by itself after 500 s, and call 2
after 240 s.

--prepare makes what a call may take along, in the folder: wheels that the GPU machine lacks, and kernels compiled
ahead. Its environment has the packages of that machine; then both calls run in it on a CPU.

On two busy cores of an AMD EPYC (2026-11-28), the environment took one minute and the kernels six. A dry run took nine,
and less than three of processor time.

Exit status 0: all steps succeeded; 1: one did not; 2: an argument is wrong; 130: Ctrl-C; 143: SIGTERM.
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

from batch_manager.tools.command_parser import CommandParser, within
from tests.harness.command_line import OptionError, make_folder, refuse_without_effect, some_path, some_text

from .facts import KERNELS, PROBLEMS
from .runner import Runner, claim
from .steps import CALL_SECONDS, COMMIT, PREPARED, PYTHON, ROOT, STEPS

CUDA_PROGRAMS = ("/usr/local/cuda/bin", "/usr/local/nvidia/bin")       # of compute-sanitizer and nvidia-smi
# Triton's cache depends on these variables.
TRITON_VARIABLES = {"TRITON_DEFAULT_FP_FUSION": "1"}


def files_to_unpack(prepared: Path) -> list[Path]:
    return sorted([*prepared.glob("*.whl"), *prepared.glob(KERNELS)])


def environment(scratch: Path, prepared: Path | None, *, is_dry: bool) -> tuple[dict[str, str], list[str]]:
    """Unpack what was prepared, and link the kernels if the checkout came without the link. Return the environment
    variables of the steps, and a text for each file that cannot be unpacked.

    The steps do what they can without such a file. A dry run unpacks nothing, because its Python has all packages.

    scratch   folder for the unpacked files
    """
    site, cache = scratch / "site", scratch / "cache"
    problems = []
    for packed in files_to_unpack(prepared) if prepared is not None and not is_dry else ():
        try:
            if packed.name == KERNELS:
                unpack_kernels(packed, cache)
            else:
                with zipfile.ZipFile(packed) as wheel:
                    wheel.extractall(site)
        except Exception as error:
            problems.append(f"{packed.name} cannot be unpacked: {type(error).__name__}: {error}")
            print(problems[-1], flush=True)
    link = ROOT / "batch_manager" / "triton_kernels"
    if not link.exists():
        link.symlink_to(Path("..") / "triton_kernels")
    folders = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **TRITON_VARIABLES, "TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *CUDA_PROGRAMS]),
            PROBLEMS: "\n".join(problems)}, problems


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
        variables, problems = environment(scratch, prepared, is_dry=is_dry)
        runner = Runner(number, out, scratch / "results", scratch / "cache", variables, values, began,
                        None if is_dry else seconds, is_dry=is_dry, problems=problems)
        return runner.run([step for step in STEPS if step.call == number])


def run_calls(numbers: Sequence[int], options: argparse.Namespace) -> int:
    """Run the calls, and return the exit status. Raises OptionError if --out cannot be used."""
    seconds = options.seconds or CALL_SECONDS[numbers[0]]
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        make_folder("--out", out)
        for number in numbers:
            claim(out, number)
        done = [run_call(number, out, seconds, options.prepared, options.commit, is_dry=options.dry_run)
                for number in numbers]
    return 0 if all(done) else 1


def parse_options(argv: Sequence[str] | None) -> tuple[CommandParser, argparse.Namespace]:
    parser = CommandParser(prog="python -m tests.first_quarter", description=__doc__)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=some_path, metavar="FOLDER",
                      help="make what a call takes along, and dry-run all")
    what.add_argument("--call", type=int, choices=sorted(CALL_SECONDS), help="run the steps of this call")
    what.add_argument("--dry-run", action="store_true", help="run both calls on a CPU; nothing has a time limit")
    add("--environment", type=some_path, help="with --prepare: folder of the virtual environment (in the user's cache)")
    add("--out", type=some_path, help="folder for the archive and the list of steps; a dry run needs none")
    add("--prepared", type=some_path, help="folder that --prepare made")
    add("--seconds", type=within(1, 86_400),
        help=f"with --call: its time limit ({CALL_SECONDS[1]} and {CALL_SECONDS[2]})")
    add("--commit", type=some_text, help="commit of the checkout, if git is missing")
    options = parser.parse_args(argv)
    mode, others = ("with --prepare", ("out", "prepared", "seconds", "commit")) if options.prepare is not None else (
        ("with --dry-run", ("environment", "seconds")) if options.dry_run else ("with --call", ("environment",)))
    refuse_without_effect(parser, options, mode, others)
    if options.call is not None and options.out is None:
        parser.error("--out is missing")
    if options.prepared is not None and not (os.path.isdir(options.prepared) and files_to_unpack(
            options.prepared)):
        parser.error(f"--prepared is {options.prepared}, which has no wheel and no {KERNELS}; expected the folder that "
                     "--prepare made; name it, or leave the option out")
    return parser, options


def main(argv: Sequence[str] | None = None) -> int:
    parser, options = parse_options(argv)
    status = 128 + signal.SIGINT

    def interrupt(number: int, frame: object) -> None:
        nonlocal status
        for one in (signal.SIGINT, signal.SIGTERM):        # a second one would cost the results
            signal.signal(one, signal.SIG_IGN)
        status = 128 + number
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if options.prepare is not None:
            from .prepare import prepare

            return prepare(options.prepare, options.environment)
        return run_calls([options.call] if options.call is not None else sorted(CALL_SECONDS), options)
    except OptionError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
