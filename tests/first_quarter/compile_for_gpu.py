"""Compiles kernels ahead for sm_90 (H100, H200), without a GPU.

    python -m tests.first_quarter.compile_for_gpu MODEL ROWS [TOKENS_PER_BLOCK]      what an engine compiles when loaded
    python -m tests.first_quarter.compile_for_gpu correctness DTYPE                  what that section compiles

MODEL is a name of gpu_report/shapes.py, or the folder of a model. ROWS is the engine's `max_batch_size`. The engine is
built in bfloat16 with graphs, as on a GPU, and `correctness` is a section of gpu_report, except that compiling replaces
launching. The kernels, and the launchers that triton compiles for them, are kept in TRITON_CACHE_DIR. They are used
where triton is the same file, and launchers where Python has the same version, too. The last line is the number of
kernels.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from torch.nn import functional

from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.runtime import build_backend, packing
from batch_manager.runtime.forms import table
from batch_manager.runtime.forms.fixed import fused
from batch_manager.runtime.forms.fixed import shapes as graph_shapes
from batch_manager.triton_kernels import dispatch
from tests.benchmarks.gpu_report import shapes
from tests.kernels import compile_ahead_of_time as ahead

SHAPES = {shape.name: shape for shape in (shapes.LLAMA_135M, shapes.LLAMA_1B, shapes.LLAMA_8B, shapes.QWEN3_600M)}
POSITIONS = 4096
CORRECTNESS = "correctness"


class PassedOn:
    """An attention of the comparison of a fused step, which returns the queries."""

    def run(self, layer, query, *given, **more):
        return query.reshape(len(query), -1).contiguous()


def launch_once(loaded, attention, send, step, run, gives_logits):
    """Launch a fused step, in place of comparing it with the model's own."""
    run(torch.zeros(step.num_tokens, loaded.spec.hidden_size, dtype=loaded.dtype),
        torch.zeros(step.num_tokens, dtype=torch.int64), PassedOn())
    return ""


def zeros(*size, dtype=None, **more):
    """Return what torch.empty returns, but with values that a step accepts: zeros, and flags that are set."""
    return (torch.ones if dtype == torch.bool else torch.zeros)(*size, dtype=dtype, **more)


def build_engine(path: Path, rows: int, tokens_per_block: int = 64, *, num_weights: int) -> None:
    """Build an engine on a CPU that compiles its kernels and launches none.

    num_weights   number of weights by which the sizes of graphs are chosen
    """
    graph = mock.Mock(device_type="cpu")
    sizes = graph_shapes.mixed_sizes
    with (mock.patch.object(dispatch, "_decide", lambda device_type: "triton"),
          mock.patch.object(torch, "empty", zeros),
          mock.patch.object(functional, "linear", lambda x, weight, bias=None: torch.zeros(
              len(x), len(weight), dtype=x.dtype)),
          mock.patch.object(torch.Tensor, "addmm_", lambda self, *given, **more: self),
          mock.patch.object(fused, "difference_from_layers", launch_once),
          mock.patch.object(table, "difference_of_graphs", lambda *given, **more: ""),
          mock.patch.object(build_backend, "mixed_sizes", lambda rows, tokens, _: sizes(rows, tokens, num_weights)),
          torch.inference_mode()):
        build_backend.build_native_backend(path, TrtGptModelOptionalParams(
            device="cpu", load_format="dummy", dtype="bfloat16", num_threads=1, max_batch_size=rows, cpu_compile=False,
            enable_chunked_context=True,
            kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=64 * tokens_per_block)),
            layout=packing.packed, num_slots=rows, graph=graph)


def check_kernels(dtype: torch.dtype, folder: Path) -> None:
    """Compile the kernels of the section `correctness`. Their inputs are not filled, and no result is compared."""
    from tests.benchmarks.gpu_report import bench, correctness, pages

    def launch(made, name, *args, oracle_as_is=False, **kwargs):
        dispatch.kernel(name, made.device)(*args, **kwargs)
        return 0.0

    def launch_once(sequences, launch):
        launch(0)
        return 0.0

    clock = SimpleNamespace(is_dry=False, device=torch.device("cpu"), name="none")
    with (mock.patch.object(dispatch, "_decide", lambda device_type: "triton"),
          mock.patch.object(torch.Tensor, "normal_", lambda values, **more: values),
          mock.patch.object(correctness, "error_of", launch),
          mock.patch.object(pages.PagedSequences, "decode_error", launch_once),
          mock.patch.object(pages.PagedSequences, "context_error", launch_once),
          torch.inference_mode()):
        for check in correctness.CHECKS.values():
            check(bench.Bench(clock, dtype, folder))


def build_launchers() -> int:
    """Let triton compile a launcher of each compiled kernel. Return the number of kernels.

    A launcher is linked with libcuda, which this machine lacks. It is stored before it is found that it cannot be
    loaded.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    kernels = {kernel.hash: kernel for kernel in ahead.compiled}
    for kernel in kernels.values():
        try:
            CudaLauncher(kernel.src, kernel.metadata)
        except ImportError as error:
            if "libcuda" not in str(error) and "undefined symbol: cu" not in str(error):
                raise
    return len(kernels)


def main(what: str, *given: str) -> None:
    triton.runtime.driver.set_active(ahead.AbsentGpu(*ahead.GPUS["sm_90"], 0))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", "-x", "c",
                        "/dev/null"], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        if what == CORRECTNESS:
            check_kernels(getattr(torch, given[0]), Path(folder))
        elif what in SHAPES:                               # one layer compiles what all layers compile
            path = dataclasses.replace(SHAPES[what], layers=1, positions=POSITIONS).write(Path(folder))
            build_engine(path, *map(int, given), num_weights=SHAPES[what].matrix_entries)
        else:
            build_engine(Path(what), *map(int, given), num_weights=2 * 10**6)
        print(f"{build_launchers()} kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
