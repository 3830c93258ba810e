"""The parts of the program `tests.first_hour`, which tests and measures on a new GPU machine.

A part is a command with a time limit.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = Path("/tmp/site")                 # for wheels on a machine without a package registry
REQUIRED_WHEELS = ("orjson",)            # needed by the package and missing in the image of the machine
PROCESSES = 4                            # for tests that share one GPU
TINY_RUN = ("-m", "tests.first_hour.tiny_run")
BF16_TEST = "tests/runtime/test_bf16_engine.py"
# Kernel tests that compile for other GPUs, or pretend to have one, and run no kernel.
WITHOUT_A_GPU = tuple(f"tests/kernels/test_{name}.py" for name in ("ahead_of_time", "argument_sets", "pretended_gpu"))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the first hour: a command and its time limit.

    seconds           time limit
    arguments         arguments of the Python interpreter; {out} stands for the output folder
    dry               arguments for a machine without a GPU
    program           command in front of the interpreter, except in a dry run
    environment       additional environment variables
    dry_environment   additional environment variables in a dry run
    """

    name: str
    text: str
    seconds: int
    arguments: tuple[str, ...]
    dry: tuple[str, ...]
    program: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    dry_environment: tuple[tuple[str, str], ...] = ()

    def command(self, out: Path, *, is_dry: bool) -> list[str]:
        """Return the command, which runs in the folder ROOT.

        Raises FileNotFoundError if `program` is not installed.
        """
        before = () if is_dry else self.program
        if before and shutil.which(before[0]) is None:
            raise FileNotFoundError(f"{before[0]} is not installed on this machine")
        arguments = self.dry if is_dry else self.arguments
        return [*before, sys.executable, *(argument.format(out=out) for argument in arguments)]


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def _report(*arguments: str) -> tuple[str, ...]:
    return ("-m", "batch_manager.tools.gpu_report", "--out", *arguments)


def gpu_test_files() -> tuple[str, ...]:
    """Return the files with GPU tests, except those of the kernels and of the engine in bfloat16."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [file.relative_to(ROOT).as_posix() for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    return tuple(name for name in names if name != BF16_TEST and not name.startswith("tests/kernels/"))


_LEFT_OUT = tuple(f"--ignore={test}" for test in WITHOUT_A_GPU)
_INTERPRETED = (("TRITON_INTERPRET", "1"), ("OMP_NUM_THREADS", "1"))

# torch allocates memory in large pieces. Without its cache, each tensor is an allocation of its own, and memcheck sees
# an access behind its end.
_SINGLE_ALLOCATIONS = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")

PARTS = (
    Part("report", "denominators, correctness by value, then every goal", 540,
         _report("{out}", "--minutes", "8"), _report("{out}", "--dry-run"), dry_environment=_INTERPRETED),
    Part("engine", "a bfloat16 engine on the GPU against float32 on the CPU", 90,
         _pytest("-n", "0", "-m", "gpu", BF16_TEST), _pytest("-n", "0", "-m", "gpu", BF16_TEST)),
    Part("kernels", "every kernel test, on the GPU, by four processes", 270,
         _pytest("-n", str(PROCESSES), *_LEFT_OUT, "tests/kernels"),
         _pytest("-n", "0", "--collect-only", *_LEFT_OUT, "tests/kernels")),
    Part("gpu-tests", "all other tests that need a GPU", 150,
         _pytest("-n", str(PROCESSES), "-m", "gpu", *gpu_test_files()),
         _pytest("-n", "0", "-m", "gpu", *gpu_test_files())),
    Part("settings", "launch settings of kernels: the fastest as code", 260,
         _report("{out}/settings", "--goal", "settings", "--minutes", "4"),
         _report("{out}/settings", "--goal", "settings", "--dry-run"), dry_environment=_INTERPRETED),
    Part("memcheck", "accesses outside of memory, in a tiny engine", 150, (*TINY_RUN, "--device", "cuda"),
         (*TINY_RUN, "--device", "cpu"), program=(*_SANITIZER, "memcheck"), environment=_SINGLE_ALLOCATIONS),
    Part("racecheck", "races in shared memory, in a tiny engine", 120, (*TINY_RUN, "--device", "cuda"),
         (*TINY_RUN, "--device", "cpu"), program=(*_SANITIZER, "racecheck")),
)

# Parts per call. A call takes at most ten minutes, and all calls together at most half an hour. The first call measures
# every goal, in case there is no other.
CALLS = (("report",), ("engine", "kernels", "gpu-tests"), ("settings", "memcheck", "racecheck"))
CALL_MINUTES = 9.5
