"""The form `graph`: replays captured launches of a step, in one call.

For each row count in shapes.py there is one graph for generation steps in which all rows are greedy, and one for all
other generation steps. If attention may split sequences into parts at a row count, there are two more graphs for this
row count. For steps with contexts there is one graph for each size of `mixed_sizes`, and one more if attention may
split sequences or contexts into parts. If the model has adapters, there are as many again for steps with an adapter,
without those of greedy steps. The number of shapes of such steps is a hundred times the number of graphs that
could be captured; without a graph, such a step gains nothing from fixed addresses, and no other form has them.

All graphs are captured before the first request. The largest graph is captured first, so that the others can share its
memory. A shape runs once before its capture, because kernels are tuned and compiled at their first use. Neither tuning
nor compilation can be captured.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....contained_log import log
from ....decoding.slots import ADAPTER, SAMPLES
from ....handover import ScheduledBatch
from ...device.memory import used_memory
from ...device.running import first_line
from ...parts import DeviceParts
from ..fixed.form import SERVED, FixedResult, has_adapter_tiles, read_result
from ..fixed.inputs import FixedInputs
from ..fixed.launches import Launches
from ..fixed.shapes import MOST_CONTEXTS, Shape, captured_shapes, mixed_shape, padded, padded_mixed
from ..form import CONTEXT_TOKENS, CONTEXTS, CONTEXTS_AT_ONCE, ROWS, NoForm

WITHOUT_GRAPHS = "steps are launched without graphs: %s"        # the message of the log, with the reason


class GraphForm:
    """Pads a step to a shape, and launches it in one call.

    replays   each shape -> a function that launches the steps of this shape
    """

    name, threads = "graph", None

    def __init__(self, parts: DeviceParts, inputs: FixedInputs, replays: Mapping[Shape, Callable[[], None]]) -> None:
        self._parts, self._inputs, self._replays = parts, inputs, dict(replays)
        self._rows = sorted({shape.rows for shape in replays if not shape.contexts})
        self._sizes = frozenset((shape.rows, shape.context_tokens) for shape in replays if shape.contexts)
        self.dispatch = parts.attention.dispatch
        self.serves = (SERVED | (CONTEXTS if self._sizes else 0)
                       | (ADAPTER if any(shape.adapts for shape in replays) else 0))

    def misfit(self, batch: ScheduledBatch) -> int:
        if not batch.context:
            if len(batch.generation) > self._rows[-1]:
                return ROWS
        elif len(batch.context) > MOST_CONTEXTS:
            return CONTEXTS_AT_ONCE
        elif self._size(batch) is None:
            return CONTEXT_TOKENS
        return self._inputs.oversize(batch)

    def start(self, batch: ScheduledBatch, traits: int) -> FixedResult:
        inputs = self._inputs
        if batch.context:
            shape = mixed_shape(*self._size(batch))
        else:
            shape = Shape(padded(len(batch.generation), self._rows), False, traits & (SAMPLES | ADAPTER) != 0)
        if traits & ADAPTER:
            shape = shape._replace(adapts=True)
        shape = inputs.write(batch, shape)
        inputs.send(shape)
        self._replays[shape]()
        return read_result(self._parts, inputs, batch, shape, traits)

    def _size(self, batch: ScheduledBatch) -> tuple[int, int] | None:
        """Return the size to which a step with contexts is padded; None if no graph holds the step."""
        return padded_mixed(len(batch.generation), sum(len(work.token_ids) for work in batch.context), self._sizes)

    def with_launches(self, launch: Callable[[Shape], None]) -> "GraphForm":
        """Return the same form with `launch`, which launches a step of a shape, in place of the graphs."""
        return GraphForm(self._parts, self._inputs, {shape: partial(launch, shape) for shape in self._replays})

    def figures(self) -> dict[str, int]:
        return {"Captured Graphs": len(self._replays)}

    def close(self) -> None:
        self._replays.clear()


def capture(parts: DeviceParts, inputs: FixedInputs, launches: Launches, sizes: frozenset[tuple[int, int]],
            graph: Callable[..., Any]) -> GraphForm:
    """Capture a graph for each shape, largest first, and replay it once, so that no request waits for its upload.

    sizes   sizes (generation rows, context tokens) of the steps with contexts for which graphs are captured
    graph   CapturedGraph, or a class with its methods
    Raises  NoForm if a capture fails
    """
    began, used, device, graphs = time.monotonic(), used_memory(parts.device), parts.device, {}
    shapes = captured_shapes(parts.num_slots, sizes, inputs.may_split, has_adapter_tiles(parts))
    try:
        largest = None
        for shape in sorted(shapes, key=lambda shape: (shape.num_tokens, shape), reverse=True):
            inputs.write_padding(shape)
            inputs.send(shape)
            launches.launch(shape)
            graphs[shape] = graph(device, largest)
            graphs[shape].capture(partial(launches.launch, shape))
            graphs[shape].replay()
            largest = largest or graphs[shape]
    except (RuntimeError, MemoryError) as error:
        raise NoForm(f"capturing {shape} raised {first_line(error)}", is_wrong=True) from error
    log.info("captured %d graphs of steps of up to %d generating sequences and %d context tokens in %.1f s; they "
             "take %s bytes", len(graphs), max(shape.rows for shape in shapes),
             max(shape.context_tokens for shape in shapes), time.monotonic() - began,
             f"{used_memory(device) - used:,}")
    return GraphForm(parts, inputs, {shape: graph.replay for shape, graph in graphs.items()})
