"""T18: each kernel call of tests/kernels, and its bfloat16 variant, compiles for GPUs that the machine does not have.

    python -m tests.campaigns --suite T18

The GPUs are sm_80, sm_90, sm_100 and gfx942. The compilers are the installed Triton and each version in OTHER_TRITONS.
The suite installs each of these versions into a folder of the system's temporary folder. No kernel may spill registers
or need a stack, except for the kernels in ALLOWED. No kernel may take more shared memory than the GPU gives a program.
First, the kernels are compiled in the sizes of large models, see test_ahead_of_time.py.
The seed has no effect. `--jobs` is the number of GPUs for which kernels are compiled at a time. Triton's cache keeps
the results for the next run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .registry import Options, Summary

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = ROOT / "tests" / "kernels"
GPUS = ("sm_80", "sm_90", "sm_100", "gfx942")
OTHER_TRITONS = ("3.6.0",)
NO_CALLS = ("tests/kernels/test_activation.py::test_an_unknown_kind_is_refused",         # they call no kernel
            "tests/kernels/test_fused_linear.py::test_an_unknown_kind_of_activation_is_refused")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Limits of the stack bytes and register spills of some kernels, in some dtypes on some GPUs, and their reason."""

    kernels: tuple[str, ...]
    gpus: tuple[str, ...]
    dtypes: tuple[str, ...]
    stack_bytes: int
    spills: int
    reason: str


ALLOWED = (
    Allowed(("_context_kernel", "_decode_kernel", "_deterministic_linear_kernel", "_fused_linear_kernel"), GPUS,
            ("float32",), 4512, 0, "products without matrix instructions: float32 is there to compare with"),
    Allowed(("_context_kernel",), ("sm_100",), ("float16", "bfloat16"), 24, 0,
            "two to six registers, mostly with a window"),
    Allowed(("_decode_kernel",), ("sm_100",), ("float16", "bfloat16"), 8, 0,
            "two registers, with heads of 256 entries and a softcap"),
    Allowed(("_decode_kernel",), ("gfx942",), ("bfloat16",), 8, 1, "one register, with heads of 256 entries"),
    Allowed(("_fused_linear_kernel",), GPUS, ("float16", "bfloat16"), 248, 0,
            "tiles of rows that do not begin at multiples of 16 bytes, which no model has"),
    Allowed(("_sample_piece_kernel", "_sample_digit_kernel"), ("sm_80", "sm_100"), ("float32",), 8, 0,
            "two registers, with Triton 3.6 only"),
)


def record_calls(file: Path, tests: tuple[Path, ...] = (KERNEL_TESTS,), *, each_value_once: bool = False) -> None:
    """Run `tests` on a pretended GPU, and write each kernel call to `file`. Raises RuntimeError if a test fails.

    each_value_once   run only as many tests as are needed for each value of each parameter of each test
    """
    environment = {**os.environ, "BATCH_MANAGER_ARGUMENT_SETS": str(file),
                   "BATCH_MANAGER_EACH_VALUE_ONCE": str(int(each_value_once))}
    left_out = [f"--deselect={test}" for test in NO_CALLS]
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", *left_out, *map(str, tests)], cwd=ROOT,
                         env=environment, text=True, capture_output=True)
    if ran.returncode:
        raise RuntimeError(f"not every call was reached:\n{ran.stdout[-4000:]}{ran.stderr[-1000:]}")


def compile_large_models() -> list[str]:
    """Compile all cases of test_ahead_of_time.py for each GPU. Return the last lines of pytest if a test fails."""
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/kernels/test_ahead_of_time.py"],
                         cwd=ROOT, env={**os.environ, "BATCH_MANAGER_ALL_CASES": "1"}, text=True, capture_output=True)
    return [] if ran.returncode == 0 else [f"cases of large models: {ran.stdout[-2000:]}{ran.stderr[-500:]}"]


def folder_of(triton: str) -> Path:
    """Return the folder of the Triton version `triton`, which is installed there if the folder has no Triton.

    Raises RuntimeError if the installation fails.
    """
    folder = Path(tempfile.gettempdir()) / f"triton-{triton}"
    if not (folder / "triton").exists():
        ran = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder),
                              f"triton=={triton}"], text=True, capture_output=True)
        if ran.returncode:
            raise RuntimeError(f"triton {triton} could not be installed: {ran.stderr[-500:]}")
    return folder


def compile_calls(file: Path, gpus: tuple[str, ...], *, triton: Path | None = None,
                  seconds: float | None = None) -> list[dict]:
    """Compile the kernel calls in `file` for each of `gpus`, and return the records of compile_argument_sets.py.

    Raises RuntimeError if the program fails.

    triton   the folder of a version of Triton; None: the installed version
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"          # the default differs between versions of Triton
    if triton is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(triton), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(KERNEL_TESTS / "compile_argument_sets.py"), str(file), *gpus]
    ran = subprocess.run([*command, *([] if seconds is None else ["--seconds", str(seconds)])], env=environment,
                         text=True, capture_output=True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {ran.stderr[-2000:]}")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def judge(records: list[dict], allowed: tuple[Allowed, ...] = ALLOWED) -> list[str]:
    """Return a line for each record of a kernel that did not compile or exceeds the limits of the module docstring."""
    wrong = []
    for record in records:
        if "error" in record:
            wrong.append(f"{record['gpu']}: {record['module']} does not compile: {record['error']}; {record['call']}")
        elif "kernel" in record:
            wrong += [f"{record['gpu']}: {record['kernel']} {text}; {record['call']}"
                      for text in _figures_that_are_wrong(record, allowed)]
    return wrong


def _figures_that_are_wrong(record: dict, allowed: tuple[Allowed, ...]) -> list[str]:
    wrong = []
    if record["shared_bytes"] > record["shared_limit_bytes"]:
        wrong.append(f"takes {record['shared_bytes']:,} bytes of shared memory of {record['shared_limit_bytes']:,}")
    dtype = dtype_of(record["call"])
    entries = [one for one in allowed if record["kernel"] in one.kernels and record["gpu"] in one.gpus
               and dtype in one.dtypes]
    if (record["stack_bytes"] > max((one.stack_bytes for one in entries), default=0)
            or record["spills"] > max((one.spills for one in entries), default=0)):
        wrong.append(f"spills {record['spills']} and takes {record['stack_bytes']} bytes of stack in {dtype}")
    return wrong


def dtype_of(call: dict) -> str:
    """Return the dtype of a call's first floating-point tensor, or "integers" if the call has none."""
    tensors = [value for value in [*call["args"], *call["kwargs"].values()] if isinstance(value, dict)]
    return next((value["dtype"] for value in tensors if "float" in value["dtype"]), "integers")


def run(options: Options) -> Summary:
    failures, short, parts, unusual = compile_large_models(), [], [], Counter()
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls"
        try:
            record_calls(file)
        except RuntimeError as error:
            return Summary("T18: nothing was compiled", [f"{error}\n(python -m tests.campaigns --suite T18)"])
        for triton in (None, *OTHER_TRITONS):
            try:
                where = None if triton is None else folder_of(triton)
            except RuntimeError as error:
                short.append(str(error))
                continue

            def compile_one(gpu: str, where: Path | None = where) -> list[dict]:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                return compile_calls(file, (gpu,), triton=where, seconds=left)

            with ThreadPoolExecutor(options.jobs) as pool:
                for records in pool.map(compile_one, GPUS):
                    end = records[-1]
                    failures += [f"triton {end['triton']}: {line}" for line in judge(records)]
                    unusual.update(f"{record['kernel']} on {record['gpu']} in {dtype_of(record['call'])} with triton "
                                   f"{end['triton']}" for record in records if record.get("spills", 0)
                                   or record.get("stack_bytes", 0))
                    parts.append(f"{end['gpu']} {end['calls']:,} calls, {end['variants']:,} variants (triton "
                                 f"{end['triton']})")
                    if end["left"]:
                        short.append(f"{end['gpu']} with triton {end['triton']}: {end['left']} calls are left")
    return Summary(f"T18: {'; '.join(parts)}", failures, short,
                   [f"{count} variants spill or need a stack: {what}" for what, count in sorted(unusual.items())])
