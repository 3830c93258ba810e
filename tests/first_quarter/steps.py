"""The steps of `tests.first_quarter`, the first quarter of an hour on a GPU, in the order of their worth."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALL_SECONDS = {1: 500, 2: 240}          # a call ends by itself after so many seconds
BF16_TEST = "tests/runtime/test_bf16_engine.py"
# Kernel tests that compile for other GPUs, or pretend to have one, and run no kernel.
WITHOUT_A_GPU = tuple(f"tests/kernels/test_{name}.py" for name in ("ahead_of_time", "argument_sets", "pretended_gpu"))

# Arguments that the runner replaces by none, one or several arguments.
PYTHON, OUT, MINUTES, RATES, COMMIT, PREPARED = (
    "{python}", "{out}", "{minutes}", "{rates}", "{commit}", "{prepared}")
_INTERPRETED = ("env", "TRITON_INTERPRET=1", "OMP_NUM_THREADS=1", PYTHON, "-m", "tests.quick_interpreter")


@dataclass(frozen=True, slots=True)
class Step:
    """One step: a command that runs in a process of its own.

    call          number of the call that runs it
    limit         time limit in seconds; what earlier steps of the call left of theirs is added
    expected      estimated seconds on an H200; no step has run on a GPU yet
    command       command; it may have the arguments that this module defines
    dry           command for a machine without a GPU
    environment   additional environment variables, except in a dry run
    """

    call: int
    name: str
    text: str
    limit: int
    expected: int
    command: tuple[str, ...]
    dry: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def gpu_test_files() -> tuple[str, ...]:
    """Return the files with GPU tests, except those of the kernels and of the engine in bfloat16."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [file.relative_to(ROOT).as_posix() for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    return tuple(name for name in names if name != BF16_TEST and not name.startswith("tests/kernels/"))


def _pytest(processes: int, *arguments: str) -> tuple[str, ...]:
    return ("pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-n", str(processes), *arguments)


def _report(call: int, name: str, text: str, limit: int, expected: int, sections: str, *options: str) -> Step:
    """Return a step that runs sections of the report; `options` are those that have no effect in a dry run."""
    report = "tests.benchmarks.gpu_report"
    shared = ("--out", OUT, "--minutes", MINUTES, RATES, COMMIT, "--section", *sections.split())
    return Step(call, name, text, limit, expected, (PYTHON, "-m", report, *options, *shared),
                (*_INTERPRETED, report, "--dry-run", *shared))


def _gpu_tests(name: str, text: str, limit: int, expected: int, processes: int, *files: str) -> Step:
    """Return a step that runs tests marked `gpu`; without a GPU, they run in a rehearsal, see tests/harness/gpu.py."""
    return Step(1, name, text, limit, expected, (PYTHON, "-m", *_pytest(processes, "-m", "gpu", *files)),
                ("env", "BATCH_MANAGER_GPU_REHEARSAL=1", *_INTERPRETED, *_pytest(0, "-m", "gpu", *files)))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", f"tests.first_quarter.{name}", *arguments)


_KERNEL_TESTS = (*(f"--ignore={test}" for test in WITHOUT_A_GPU), "tests/kernels")

STEPS = (
    Step(1, "facts", "the machine, its versions, whether the kernels compiled ahead are used", 12, 8,
         _module("facts", PREPARED), _module("facts", PREPARED)),
    _report(1, "correctness-bf16", "every kernel by value against float64", 45, 25, "correctness"),
    _gpu_tests("engine-bf16", "an engine in bfloat16 against float32: launched one by one, fused, as graphs", 55, 45, 0,
               BF16_TEST),
    _report(1, "headline", "rates of the GPU; 256 requests of Qwen3-0.6B with graphs, then without", 65, 60,
            "headline headline-eager"),
    _report(1, "profile", "one step of Qwen3-0.6B x 256 by kernel, count, time and gaps", 35, 30, "profile"),
    _report(1, "sampling-and-split", "sampling; decode attention with several splits", 38, 30, "sampling decode-split"),
    _gpu_tests("gpu-tests", "all other tests that need a GPU", 75, 65, 8, *gpu_test_files()),
    _report(1, "small-steps", "decode steps of 135M x 256 and 1B x 1", 55, 50, "small-steps small-steps-eager"),
    _report(1, "large-steps", "decode steps of 8B x 32 and 8B x 256", 80, 75, "large-steps"),
    _report(1, "correctness-fp16", "every kernel by value", 20, 18, "correctness", "--dtype", "float16"),
    _report(1, "correctness-fp32", "every kernel by value", 20, 18, "correctness", "--dtype", "float32"),
    Step(2, "kernels", "every kernel test, by twelve processes", 100, 95, (PYTHON, "-m", *_pytest(12, *_KERNEL_TESTS)),
         (PYTHON, "-m", *_pytest(0, "--collect-only", *_KERNEL_TESTS))),
    # torch allocates memory in large pieces. Without its cache, each tensor is an allocation of its own, and memcheck
    # sees an access behind its end.
    Step(2, "memcheck", "accesses outside of memory, in a tiny engine", 55, 50,
         ("compute-sanitizer", "--error-exitcode", "9", "--tool", "memcheck", *_module("tiny_run", "--device", "cuda")),
         _module("tiny_run", "--device", "cpu"), (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)),
    _report(2, "idle", "idle time between steps; run-ahead against lockstep", 62, 58, "idle"),
    _report(2, "settings", "quantised products beside plain ones; launch settings of kernels, the fastest as code", 23,
            20, "quantised-products settings"),
)
