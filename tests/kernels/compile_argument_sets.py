"""Compiles recorded calls of kernels for GPUs that this machine does not have; see argument_sets.py.

    python compile_argument_sets.py FILE sm_90 gfx942 [--seconds 120]

Prints JSON objects:
    for each compiled variant of a kernel, its resources and the first call that needs it;
    for each call that does not compile, the call and the "error";
    for each GPU, the numbers of "calls" that were compiled, of "variants", and of calls "left" when the time was up.

Triton's cache keeps the compiled variants, so that a repeated run continues where the time was up.
"""

import argparse
import json
import time
from pathlib import Path

import argument_sets
import compile_ahead_of_time as compiler
import triton


def figures_of(kernel, target):
    figures = compiler.nvidia_figures(kernel) if target.backend == "cuda" else compiler.amd_figures(kernel)
    return {name: figures[name] for name in ("registers", "stack_bytes", "spills")}


def compile_for(gpu, index, calls, deadline):
    target, shared_kib, multiprocessors = compiler.GPUS[gpu]
    triton.runtime.driver.set_active(compiler.AbsentGpu(target, shared_kib, multiprocessors, index))
    seen, num_done = {}, 0
    for number, call in calls:
        if time.monotonic() > deadline:
            break
        compiler.compiled.clear()
        args, kwargs = argument_sets.arguments(call)
        about = {"gpu": gpu, "line": number, "module": call["module"], "call": call}
        try:
            argument_sets.launcher(call)(*args, **kwargs)
        except Exception as error:
            print(json.dumps({**about, "error": f"{type(error).__name__}: {error}"[:2000]}), flush=True)
        num_done += 1
        for kernel in compiler.compiled:
            if id(kernel) not in seen:
                seen[id(kernel)] = kernel
                print(json.dumps({**about, "kernel": kernel.metadata.name, "shared_bytes": kernel.metadata.shared,
                                  "shared_limit_bytes": shared_kib * 1024, **figures_of(kernel, target)}), flush=True)
    print(json.dumps({"gpu": gpu, "calls": num_done, "variants": len(seen), "left": len(calls) - num_done,
                      "triton": triton.__version__}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("gpus", nargs="+", choices=compiler.GPUS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all GPUs together")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    calls = list(argument_sets.read(options.file.read_text().splitlines()))
    for index, gpu in enumerate(options.gpus):
        compile_for(gpu, index, calls, deadline)


if __name__ == "__main__":
    main()
