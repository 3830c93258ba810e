"""A model backend that computes nothing and takes the time predicted by a cost model."""

from collections import Counter

import numpy as np

from ...handover import ScheduledBatch, StepOutput
from ...seams import BackendInfo, MemoryUsage
from .cost_model import CostModel
from .log_book import LogBook
from .scatter import Scatter
from .step_shape import StepShape, shape_of_batch, shared_tokens
from .step_times import StepTimes
from .virtual_time import VirtualClock

TOKEN = 1    # result of every step for every sequence


class SimulatedBackend:
    """Implements seams.ModelBackend, without beams and draft tokens. Sequences end by length only.

    cost      predicts the time of each step
    clock     virtual clock, which the backend advances by the predicted time
    log_book  records each token
    seed      seed of the random variation of step times

    steps     number of launched steps
    busy_s    total time of the steps in seconds
    beyond    name of an amount in StepShape -> number of steps in which the amount was above the fitted range of the
              cost model
    steps_beyond    number of steps in which any amount was above the fitted range
    reused_tokens   number of prompt tokens found in the KV cache
    """

    def __init__(self, info: BackendInfo, cost: CostModel, clock: VirtualClock, log_book: LogBook,
                 seed: tuple[int, ...] = (0,)) -> None:
        self.info = info
        self.cost, self.clock, self._log_book = cost, clock, log_book
        self._times, self._scatter = StepTimes(cost), Scatter(cost, seed)
        self._busy_until = 0.0
        self._request_ids = np.zeros(info.num_slots, np.int64)      # by slot
        self._found_tokens = np.zeros(info.num_slots, np.int64)
        self._tokens = np.full(info.num_slots, TOKEN, np.int32)
        self._finish = np.zeros(info.num_slots, np.uint8)
        self.steps = 0
        self.busy_s = 0.0
        self.beyond: Counter[str] = Counter()
        self.steps_beyond = 0
        self.reused_tokens = 0

    def start(self, batch: ScheduledBatch) -> "SimulatedStep":
        for work in batch.context:
            if work.setup is not None:
                self.note_start(work.slot, work.setup.request_id, work.start)
        return SimulatedStep(self, batch, self.launch(shape_of_batch(batch, self._found_tokens)))

    def note_start(self, slot: int, request_id: int, found_tokens: int) -> None:
        """Note the start of a request, and how many tokens of its prompt were found in the KV cache."""
        if slot >= len(self._request_ids):
            self._grow(slot)
        self._request_ids[slot] = request_id
        self._found_tokens[slot] = found_tokens
        self.reused_tokens += found_tokens

    def shared_tokens(self, slots: np.ndarray) -> int:
        """Return `shared_tokens` of a step in which the sequences in `slots` generate."""
        return shared_tokens(self._found_tokens[slots]) if self.reused_tokens else 0

    def launch(self, shape: StepShape) -> float:
        """Launch a step of this shape, after the host's part of its iteration. Returns when it ends."""
        clock = self.clock
        clock.now += self._times.host_s(shape)
        seconds = self._times.step_s(shape) * self._scatter.factor(self.steps, has_context=bool(shape.context_requests))
        self._busy_until = max(clock.now, self._busy_until) + seconds
        self.steps += 1
        self.busy_s += seconds
        if beyond := self.cost.beyond(shape):
            self.beyond.update(beyond)
            self.steps_beyond += 1
        return self._busy_until

    def seconds(self, shape: StepShape, count: int) -> tuple[np.ndarray, float]:
        """Return (seconds of each of the next `count` steps, seconds of the host's part of each iteration).

        shape   the shapes of these steps, with the same number of requests
        """
        factors = self._scatter.factors(self.steps, count, has_context=bool(shape.context_requests))
        return self._times.step_s(shape) * factors, self._times.host_s(shape)

    def note_leap(self, shape: StepShape, step_s: np.ndarray) -> None:
        """Note that the first steps of `shape` ran, each for `step_s`. The clock is left to the caller."""
        count = len(step_s)
        self.steps += count
        busy_s = np.empty(count + 1)        # added one after the other
        busy_s[0], busy_s[1:] = self.busy_s, step_s
        self.busy_s = float(busy_s.cumsum()[-1])
        are_beyond: np.ndarray | None = None
        for name, most in self.cost.most.items():
            amount = getattr(shape, name)
            if isinstance(amount, int):
                if amount <= most:
                    continue
                here = np.ones(count, bool)
            else:
                here = amount[:count] > most
            if number := int(np.count_nonzero(here)):
                self.beyond[name] += number
                are_beyond = here if are_beyond is None else are_beyond | here
        if are_beyond is not None:
            self.steps_beyond += int(np.count_nonzero(are_beyond))

    def run_until(self, done_at_s: float) -> float:
        """Note that the last launched step ends at `done_at_s`, and return it."""
        self._busy_until = done_at_s
        return done_at_s

    def _grow(self, slot: int) -> None:
        count = max(2 * len(self._request_ids), slot + 1)
        self._request_ids = np.resize(self._request_ids, count)
        self._found_tokens = np.resize(self._found_tokens, count)
        self._tokens, self._finish = np.full(count, TOKEN, np.int32), np.zeros(count, np.uint8)

    def end(self, batch: ScheduledBatch, done_at: float) -> StepOutput:
        """Advance the clock to `done_at`, when the step of `batch` ends, and return the output of the step."""
        self.clock.now = max(self.clock.now, done_at)
        slots = batch.yielding
        self._log_book.note(self._request_ids[slots], self.clock.now)
        return StepOutput(batch.micro_batch_id, slots, self._tokens[:len(slots)], self._finish[:len(slots)])

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def close(self) -> None:
        pass


class SimulatedStep:
    """A step that SimulatedBackend has launched."""

    def __init__(self, backend: SimulatedBackend, batch: ScheduledBatch, done_at: float) -> None:
        self._backend, self._batch, self._done_at = backend, batch, done_at

    def finish(self) -> StepOutput:
        return self._backend.end(self._batch, self._done_at)
