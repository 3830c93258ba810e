"""Graphs of plain steps: the launches of one call of `PlainSteps.run_step`, replayed in one call.

For each number of rows of graph_shapes.py there is one graph for generation steps whose rows are all greedy, and one
for others; and as many again where attention may cut sequences into parts. For each size of a step with contexts there
is one. All are captured before there are requests, the largest first, so that the memory which it takes serves the
others too. A shape runs once before its capture: what is chosen or compiled at a first use must not be while launches
are recorded.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..config import TrtGptModelOptionalParams
from ..contained_log import log
from ..errors import ConfigError
from ..triton_kernels.dispatch import use_triton
from . import layouts
from .device import CapturedGraph, first_line, used_memory
from .graph_shapes import StepShape
from .layouts import Layout


def may_capture(params: TrtGptModelOptionalParams, device: torch.device, layout: Layout, has_own_attention: bool
                ) -> bool:
    """Whether plain steps are to be replayed. Raises ConfigError where it was asked for and cannot be."""
    if not params.cuda_graphs:         # None too: no GPU has shown yet that what is replayed is right
        return False
    obstacle = _obstacle(params, device, layout, has_own_attention)
    if obstacle:
        raise ConfigError(f"cuda_graphs was asked for, and {obstacle}", "a GPU, Triton's kernels, and no such option",
                          "leave cuda_graphs out: each kernel of a step is then launched by itself")
    return True


def _obstacle(params: TrtGptModelOptionalParams, device: torch.device, layout: Layout, has_own_attention: bool) -> str:
    if device.type != "cuda":
        return f"the device is {device}"
    if not use_triton(device):
        return "triton is not installed"
    if params.deterministic:
        return "deterministic is set"
    if has_own_attention:
        return "there is an attention of the user's own"
    if layout is layouts.padded:
        return "steps of TrtGptModelType.V1 are padded to their static batch"
    return ""


class Graphs:
    """Captured steps by shape.

    run_step   what a step does on the device; its launches follow from the shape
    """

    def __init__(self, device: torch.device, run_step: Callable[[StepShape], None]) -> None:
        self._device, self._run_step = device, run_step
        self._graphs: dict[StepShape, CapturedGraph] = {}

    def capture(self, shapes: Sequence[StepShape], prepare: Callable[[StepShape], None]) -> bool:
        """Capture a graph for each shape, largest first. Whether all were; else none is there, and the log says why.

        prepare   (shape) -> None: brings the inputs of a step without sequences to the device
        """
        began, used = time.monotonic(), used_memory(self._device)
        try:
            largest = None
            for shape in sorted(shapes, key=lambda shape: (shape.num_tokens, shape), reverse=True):
                prepare(shape)
                self._run_step(shape)
                graph = CapturedGraph(self._device, largest)
                graph.capture(partial(self._run_step, shape))
                largest, self._graphs[shape] = largest or graph, graph
        except (RuntimeError, MemoryError) as error:
            self._graphs.clear()
            log.warning("steps are launched without graphs: capturing %s raised %s", shape,
                        first_line(error))
            return False
        log.info("%d graphs of steps of up to %d generating sequences and %d context tokens captured in %.1f s; they "
                 "take %s bytes", len(self._graphs), max(shape.rows for shape in shapes),
                 max(shape.context_tokens for shape in shapes), time.monotonic() - began,
                 f"{used_memory(self._device) - used:,}")
        return True

    def run(self, shape: StepShape) -> None:
        """Replay the graph of a shape, or make its launches one by one where it has none."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._run_step(shape)
        else:
            graph.replay()
