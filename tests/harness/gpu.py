"""The device of tests that are marked `gpu`: a GPU or, in a rehearsal, a CPU on which Triton kernels are interpreted.

    BATCH_MANAGER_GPU_REHEARSAL=1 TRITON_INTERPRET=1 python -m tests.quick_interpreter pytest -m gpu FILE ...

A rehearsal executes the bodies of GPU tests without a GPU. Engines for the CPU run in torch within `in_torch`. Graphs
are recorded, and replayed operation by operation. Engines have no warm-up, do not compare graphs with launches, and
have no graphs of one or two rows: these would take most of the time.
tests/runtime/test_gpu_rehearsal.py runs a rehearsal.
"""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from .warm_up import without_warm_up

IS_REHEARSAL = os.environ.get("BATCH_MANAGER_GPU_REHEARSAL") == "1"
GPU = "cpu" if IS_REHEARSAL else "cuda"              # the name of the device
REASON = "needs a CUDA device"
needs_gpu = pytest.mark.skipif(not (IS_REHEARSAL or torch.cuda.is_available()), reason=REASON)
# For tests of memory and copies that a CPU does not have.
needs_real_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=REASON)


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """Context manager: engines for the CPU that are built and run within it use no Triton kernel."""
    from batch_manager.triton_kernels import dispatch

    with mock.patch.object(dispatch, "_decide", lambda device_type: "torch") if IS_REHEARSAL else (
            contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Context manager: engines with cuda_graphs=True capture graphs on the CPU too, and none has a warm-up."""
    from batch_manager.runtime import build_backend
    from batch_manager.runtime.forms.fixed import fused, shapes
    from tests.runtime.capture_recorder import ReplayedGraph

    wanted, defaults = build_backend.wanted_forms, build_backend.build_native_backend.__kwdefaults__
    slow = {"graph": "each capture takes a second here"}
    with (without_warm_up(compares_graphs=False),
          mock.patch.object(build_backend, "wanted_forms", lambda asked: wanted(asked) | (
              {} if asked.params.cuda_graphs else slow)),
          mock.patch.dict(defaults, {"graph": ReplayedGraph}),
          mock.patch.object(shapes, "SMALL_ROWS", (4,)),
          mock.patch.object(fused, "COMPARED_TOKENS", ())):
        yield


def start_cuda() -> None:
    """Use the GPU once, if there is one, so that the files and sockets that CUDA keeps open exist before any test."""
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.ones(1, device="cuda").cpu()
