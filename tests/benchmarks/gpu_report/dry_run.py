"""Prepare a process for a dry run: a CPU, interpreted kernels, and a substitute for CUDA graphs."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from tests.harness.warm_up import without_warm_up

INTERPRET = "TRITON_INTERPRET"


def interpret_kernels() -> None:
    """Make Triton interpret the kernels.

    Raises RuntimeError if triton was imported earlier, without TRITON_INTERPRET=1.
    """
    if "triton" in sys.modules and os.environ.get(INTERPRET) != "1":
        raise RuntimeError(f"triton was imported without {INTERPRET}=1; a dry run interprets the kernels; "
                           "set the variable to 1")
    os.environ[INTERPRET] = "1"
    from batch_manager.triton_kernels.interpreter import accept_arrays_of_one_element

    accept_arrays_of_one_element()


class DryGraph:
    """A substitute for `runtime.device.running.CapturedGraph` on a CPU. A replay calls the captured function again."""

    device_type = "cpu"

    def __init__(self, device: object, memory_of: object = None) -> None:
        self.replay: Callable[[], None] = lambda: None

    def capture(self, function: Callable[[], None]) -> None:
        self.replay = function


@contextlib.contextmanager
def dry_graphs() -> Iterator[None]:
    """Context manager: an engine with cuda_graphs=True captures each graph as a DryGraph, also on a CPU.

    Steps with contexts are not captured: graphs pad these steps, and interpreting the padding takes a second per step.
    An engine has no warm-up, and does not compare its graphs with launches, which takes most of the time.
    """
    from batch_manager.runtime import build_backend

    before = _, build = build_backend.mixed_sizes, build_backend.build_native_backend
    build_backend.mixed_sizes = lambda *_: frozenset()
    build_backend.build_native_backend = lambda path, params, **more: build(
        path, params, **more, **({"graph": DryGraph} if params.cuda_graphs else {}))
    try:
        with without_warm_up(compares_graphs=False):
            yield
    finally:
        build_backend.mixed_sizes, build_backend.build_native_backend = before
