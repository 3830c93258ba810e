"""CUDA graphs of plain steps, which inputs.py defines.

A graph makes the launches of `PlainSteps.run_step` for one shape in a single call.

For each row count in shapes.py there is one graph for generation steps in which all rows are greedy, and one for
all other generation steps. If attention may split sequences into parts at a row count, there are two more graphs for
this row count. For steps with contexts there is one graph for each size of `mixed_sizes`, and one more if attention may
split sequences or contexts into parts. All graphs are captured before the first request. The largest graph is captured
first, so that the others can share its memory. A shape runs once before its capture, because kernels are tuned and
compiled at their first use. Neither tuning nor compilation can be captured.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ....config import TrtGptModelOptionalParams
from ....contained_log import log
from ....errors import ConfigError
from ....triton_kernels.dispatch import use_triton
from ...device.memory import used_memory
from ...device.running import CapturedGraph, first_line
from ...packing import Divide, padded
from ..fixed.shapes import Shape

WITHOUT_GRAPHS = "steps are launched without graphs: %s"        # the message of the log, with the reason


def obstacle_to_graphs(params: TrtGptModelOptionalParams, device: torch.device, layout: Divide, has_own_attention: bool
                       ) -> str:
    """Return why no graphs of plain steps (see inputs.py) will be captured; "": nothing is known to prevent it.

    Raises ConfigError if cuda_graphs is True but graphs are impossible.
    """
    if params.cuda_graphs is False:
        return "cuda_graphs is False"
    obstacle = _obstacle(params, device, layout, has_own_attention)
    if obstacle and params.cuda_graphs:
        raise ConfigError(f"cuda_graphs is True, but {obstacle}", "graphs need a GPU with triton and the package's own "
                          "attention, without `deterministic` and without TrtGptModelType.V1",
                          "leave cuda_graphs unset to launch kernels one by one")
    return obstacle


def _obstacle(params: TrtGptModelOptionalParams, device: torch.device, layout: Divide, has_own_attention: bool) -> str:
    if device.type != "cuda":
        return f"the device is {device}"
    if not use_triton(device):
        return "triton is not installed"
    if params.deterministic:
        return "deterministic is set"
    if has_own_attention:
        return "Parts.attention is set"
    if layout is padded:
        return "TrtGptModelType.V1 pads steps to their static batch"
    return ""


class Graphs:
    """Captures graphs of plain steps (see inputs.py), one for each shape, and replays them.

    run_step   (shape) -> None: launches a step. The shape determines all launches
    """

    def __init__(self, device: torch.device, run_step: Callable[[Shape], None]) -> None:
        self._device, self._run_step = device, run_step
        self._graphs: dict[Shape, CapturedGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, shapes: Sequence[Shape], prepare: Callable[[Shape], None]) -> str:
        """Capture a graph for each shape, largest first, and replay it once, so that no request waits for its upload.

        Return "". If a capture fails, drop all graphs and return the reason.

        prepare   (shape) -> None: sends inputs to the device, all of them padding
        """
        began, used = time.monotonic(), used_memory(self._device)
        try:
            largest = None
            for shape in sorted(shapes, key=lambda shape: (shape.num_tokens, shape), reverse=True):
                prepare(shape)
                self._run_step(shape)
                graph = CapturedGraph(self._device, largest)
                graph.capture(partial(self._run_step, shape))
                graph.replay()
                largest, self._graphs[shape] = largest or graph, graph
        except (RuntimeError, MemoryError) as error:
            self._graphs.clear()
            return f"capturing {shape} raised {first_line(error)}"
        log.info("captured %d graphs of steps of up to %d generating sequences and %d context tokens in %.1f s; they "
                 "take %s bytes", len(self._graphs), max(shape.rows for shape in shapes),
                 max(shape.context_tokens for shape in shapes), time.monotonic() - began,
                 f"{used_memory(self._device) - used:,}")
        return ""

    def run(self, shape: Shape) -> None:
        """Replay the graph of a shape, or make the launches one by one if the shape has no graph."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._run_step(shape)
        else:
            graph.replay()
