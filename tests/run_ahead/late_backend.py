"""`LateBackend`, whose steps run and fail only after the next step was launched, and `Faults`, which plans failures."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from batch_manager.handover import RowFailure, ScheduledBatch, StepOutput
from batch_manager.names import ErrorCode

NOT_LAUNCHED, NOT_RUN, NOT_DRAWN = "not launched", "not run", "not drawn"
NOT_READ, TWICE, ONE_ROW = "not read", "twice", "one row"
DISCARDED_ROW = "discarded row"
KINDS = (NOT_LAUNCHED, NOT_RUN, NOT_RUN, NOT_RUN, NOT_DRAWN, NOT_READ, TWICE, ONE_ROW)    # to sample from


class PlantedError(Exception):
    """The exception of a step that must fail."""


@dataclass(slots=True)
class Order:
    """The fault that is planned for the step of one iteration.

    kind    one of KINDS
    times   how often the fault has still to occur
    row     for ONE_ROW: index of the failing row, divided by the number of rows
    """

    kind: str
    times: int
    row: float = 0.0


class Faults:
    """Decides at random for each iteration whether its step fails, and how.

    In addition, some rows fail whose requests have ended since the launch. Such a failure must have no effect.

    rate     probability that a step fails
    counts   kind of fault -> how often it has occurred
    alone    number of single-row failures and of exceptions in steps of one sequence; only these faults may end a
             request
    ended    of the step that is being read: (iteration, slots whose requests have ended)
    """

    def __init__(self, seed: int, rate: float) -> None:
        self._draw, self._rate = Random(seed), rate
        self._orders: dict[int, Order | None] = {}
        self.counts: Counter[str] = Counter()
        self.alone = 0
        self.ended: tuple[int, list[int]] = -1, []

    def strike(self, batch: ScheduledBatch, kinds: tuple[str, ...]) -> None:
        """Raise PlantedError if the fault planned for the step is one of `kinds`, which occur at the caller's point."""
        order = self._order(batch)
        if order is None or order.kind not in kinds or not order.times:
            return
        order.times -= 1
        self.counts[order.kind] += 1
        self.alone += batch.num_sequences == 1
        raise PlantedError(order.kind)

    def failures(self, batch: ScheduledBatch) -> dict[int, RowFailure]:
        """Return {slot: failure} of the rows that fail in this step.

        The caller must make their KV cache values not finite.
        """
        order, slots = self._order(batch), batch.slots()
        spoilt = []
        if order is not None and order.kind == ONE_ROW and order.times:
            order.times -= 1
            self.counts[order.kind] += 1
            self.alone += 1
            spoilt.append(slots[int(order.row * len(slots))])
        iteration, ended = self.ended
        if self._rate and iteration == batch.iteration and ended:
            if self._draw.random() < 0.5:
                spoilt += [slot for slot in ended if slot in slots]
                self.counts[DISCARDED_ROW] += len(ended)
            self.ended = -1, []
        return {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted") for slot in spoilt}

    def _order(self, batch: ScheduledBatch) -> Order | None:
        """Return the fault of the step, if any.

        Faults of a single row, or of a step of one sequence, are rare, because they may end a request.
        """
        if not self._rate:
            return None
        if batch.iteration not in self._orders:
            strikes = self._draw.random() < self._rate
            kind, row, rarely = self._draw.choice(KINDS), self._draw.random(), self._draw.random() < 0.1
            spares = (kind == ONE_ROW or batch.num_sequences == 1) and not rarely
            self._orders[batch.iteration] = (
                Order(kind, 1 + (kind == TWICE), row) if strikes and not spares else None)
        return self._orders[batch.iteration]


class LateBackend:
    """A backend that queues launched steps, and runs them in order of launch when one of them is read.

    inner       the backend that runs each step as a whole. It must raise the faults NOT_RUN and NOT_DRAWN itself, after
                the block tables and the operations of the batch are done, because a launched step does not repeat them
    poison      function (batch, slots) that overwrites the keys and values written for these slots with NaN
    eagerness   probability that a launch runs all queued steps immediately
    """

    def __init__(self, inner, faults: Faults, poison: Callable[[ScheduledBatch, list[int]], None], eagerness: float,
                 seed: int) -> None:
        self.inner, self.faults, self._poison = inner, faults, poison
        self.info = dataclasses.replace(inner.info, is_asynchronous=True)
        self.memory_usage, self.close = inner.memory_usage, inner.close
        self._eagerness, self._draw = eagerness, Random(seed)
        self._queue: deque[LateStep] = deque()

    def start(self, batch: ScheduledBatch) -> "LateStep":
        self.faults.strike(batch, (NOT_LAUNCHED,))
        step = LateStep(batch, self.run_up_to)
        self._queue.append(step)
        if self._draw.random() < self._eagerness:
            self.run_up_to(step)
            if step.error is not None and self._draw.random() < 0.5:
                raise step.error                                  # a launch that fails after a part of its work
        return step

    def run_up_to(self, step: "LateStep") -> None:
        """Run the steps that were launched before this step, then this step."""
        while step in self._queue:
            first = self._queue.popleft()
            try:
                first.output = self._run(first.batch)
            except Exception as error:
                first.error = error

    def _run(self, batch: ScheduledBatch) -> StepOutput:
        output = self.inner.start(batch).finish()
        self.faults.strike(batch, (NOT_READ, TWICE))
        failures = self.faults.failures(batch)
        if not failures:
            return output
        self._poison(batch, list(failures))
        return dataclasses.replace(output, failures={**output.failures, **failures})


class LateStep:
    """A launched step: its output or exception, once it has run."""

    def __init__(self, batch: ScheduledBatch, run_up_to: Callable[["LateStep"], None]) -> None:
        self.batch, self._run_up_to = batch, run_up_to
        self.output: StepOutput | None = None
        self.error: Exception | None = None

    def finish(self) -> StepOutput:
        self._run_up_to(self)
        if self.error is not None:
            raise self.error
        return self.output
