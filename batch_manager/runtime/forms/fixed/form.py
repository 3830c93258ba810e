"""The forms `fused` and `fixed`: the kernels of a step are launched one by one, with inputs at fixed addresses."""

import numpy as np

from ....decoding.sampled_step import UNUSABLE
from ....decoding.slots import ADAPTER, LOG_PROBS, SAMPLES
from ....handover import ScheduledBatch, StepOutput
from ...device.running import Readback
from ...packing import slots_not_finite
from ...parts import DeviceParts
from ..form import ROWS, Choice
from .inputs import FixedInputs
from .launches import Launches
from .shapes import Shape

SERVED = SAMPLES | LOG_PROBS        # features of sequences for which launches at fixed addresses suffice


def has_adapter_tiles(parts: DeviceParts) -> bool:
    """Whether launches at fixed addresses compute adapters. With `deterministic`, other kernels multiply them."""
    return parts.adapters is not None and not parts.adapters.deterministic


class FixedForm:
    """Launches generation steps, of up to `most_rows` rows if it is set.

    name        "fused" if `launches` joins the launches of all these steps, "fixed" if the model's layers make them
    """

    threads = None

    def __init__(self, name: str, parts: DeviceParts, inputs: FixedInputs, launches: Launches,
                 most_rows: int | None = None) -> None:
        self.name, self.dispatch = name, parts.attention.dispatch
        # A joined launch leaves no place between a product and what follows it.
        self.serves = SERVED | ADAPTER if has_adapter_tiles(parts) and name != "fused" else SERVED
        self._parts, self._inputs, self._launches, self._most_rows = parts, inputs, launches, most_rows

    def misfit(self, batch: ScheduledBatch) -> int:
        if self._most_rows is not None and len(batch.generation) > self._most_rows:
            return ROWS
        return self._inputs.oversize(batch)

    def start(self, batch: ScheduledBatch, traits: int) -> "FixedResult":
        inputs = self._inputs
        shape = inputs.write(batch, Shape(
            len(batch.generation), False, traits & (SAMPLES | ADAPTER) != 0, adapts=traits & ADAPTER != 0))
        inputs.send(shape)
        self._launches.launch(shape)
        return read_result(self._parts, inputs, batch, shape, traits)

    def figures(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing to do: the parts own what is to be closed."""


def read_result(parts: DeviceParts, inputs: FixedInputs, batch: ScheduledBatch, shape: Shape, traits: int
                ) -> "FixedResult":
    """Start copying the results of a step that was just launched."""
    inputs.are_sent()
    readback = parts.readbacks.start({"results": inputs.of(shape).read_back}, is_reused=True)
    return FixedResult(batch, shape, parts.slots.active(LOG_PROBS, batch.yielding) if traits & LOG_PROBS else None,
                       readback)


class FixedResult:
    """A launched step with inputs at fixed addresses.

    asks   [r] bool: whether the sequence of each row of the output asks for log-probs; None: no sequence does
    """

    choice: Choice

    def __init__(self, batch: ScheduledBatch, shape: Shape, asks: np.ndarray | None, readback: Readback) -> None:
        self._batch, self._shape, self._asks, self._readback = batch, shape, asks, readback

    def finish(self) -> StepOutput:
        batch, shape, slots, asks = self._batch, self._shape, self._batch.yielding, self._asks
        found, num_results, num_rows = self._readback.wait()["results"], 4 * shape.num_sampled, len(batch.generation)
        rows, failures = slice(num_rows), {}
        if batch.context:                              # contexts with their last chunk come first in the output
            rows = np.array([*(shape.rows + index for index, work in enumerate(batch.context) if work.is_last_chunk),
                             *range(num_rows)], np.int64)
            finite_contexts = np.isfinite(found[num_results:].view(np.float32))
            failures = dict.fromkeys(slots_not_finite(batch.context, finite_contexts), UNUSABLE)
        tokens, finish, finite, log_prob_bits = found[:num_results].reshape(4, -1)[:, rows]
        if not finite.all():
            failures |= dict.fromkeys(slots[finite == 0].tolist(), UNUSABLE)
        log_probs = None
        if asks is not None and asks.any():
            log_probs = np.where(asks, log_prob_bits.view(np.float32), np.float32(0))
        return StepOutput(batch.micro_batch_id, slots, tokens, finish.astype(np.uint8), log_probs=log_probs,
                          failures=failures)
