"""A model backend that computes nothing and takes the time predicted by a cost model."""

from collections import Counter

import numpy as np

from ...handover import ScheduledBatch, StepOutput
from ...seams import BackendInfo, MemoryUsage
from .cost_model import CostModel
from .log_book import LogBook
from .scatter import Scatter
from .step_shape import StepShape, shape_of_batch, shared_tokens
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
        self._scatter = Scatter(cost, seed)
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
        self._set_up(batch)
        clock, shape = self.clock, shape_of_batch(batch, self._found_tokens)
        clock.now += self.cost.host_seconds(shape)
        seconds = self.cost.step_seconds(shape) * self._scatter.factor(self.steps,
                                                                       has_context=bool(shape.context_requests))
        self._busy_until = max(clock.now, self._busy_until) + seconds
        self.steps += 1
        self.busy_s += seconds
        if beyond := self.cost.beyond(shape):
            self.beyond.update(beyond)
            self.steps_beyond += 1
        return SimulatedStep(self, batch, self._busy_until)

    def _set_up(self, batch: ScheduledBatch) -> None:
        for work in batch.context:
            if work.setup is not None:
                if work.slot >= len(self._request_ids):
                    self._grow(work.slot)
                self._request_ids[work.slot] = work.setup.request_id
                self._found_tokens[work.slot] = work.start
                self.reused_tokens += work.start

    def _grow(self, slot: int) -> None:
        count = max(2 * len(self._request_ids), slot + 1)
        self._request_ids = np.resize(self._request_ids, count)
        self._found_tokens = np.resize(self._found_tokens, count)
        self._tokens, self._finish = np.full(count, TOKEN, np.int32), np.zeros(count, np.uint8)

    def end(self, batch: ScheduledBatch, done_at: float) -> StepOutput:
        """Advance the clock to `done_at`, when the step of `batch` ends, and return the output of the step."""
        self.clock.now = max(self.clock.now, done_at)
        slots = batch.generation.slots
        first = [work.slot for work in batch.context if work.is_last_chunk]
        if first:
            slots = np.concatenate([np.array(first, np.int32), slots])
        self._log_book.note(self._request_ids[slots], self.clock.now)
        return StepOutput(batch.micro_batch_id, slots, self._tokens[:len(slots)], self._finish[:len(slots)])

    def generation_shape(self, slots: np.ndarray) -> StepShape:
        """Return the shape of a generation step of the sequences in `slots`, but with `cached_tokens` 0."""
        return StepShape(generation_requests=len(slots), shared_tokens=shared_tokens(self._found_tokens[slots]))

    def generation_seconds(self, shape: StepShape, cached_tokens: np.ndarray) -> tuple[np.ndarray, float]:
        """Return (seconds of each of the next generation steps [steps], seconds of the host's part of each iteration).

        The host's part takes the same time in each iteration.

        shape           shape of each step, with `cached_tokens` 0
        cached_tokens   [steps] StepShape.cached_tokens of each step
        """
        step_s = self.cost.generation_step_seconds(shape, cached_tokens)
        return step_s * self._scatter.generation_factors(self.steps, len(cached_tokens)), self.cost.host_seconds(shape)

    def leap(self, request_ids: np.ndarray, shape: StepShape, ends_s: np.ndarray, step_s: np.ndarray,
             cached_tokens: np.ndarray) -> None:
        """Run len(ends_s) generation steps of the requests `request_ids`, in lockstep.

        shape   shape of each step, with `cached_tokens` 0
        ends_s, step_s, cached_tokens   [steps] end time, seconds and cached tokens of each step
        """
        steps = len(ends_s)
        self.steps += steps
        self.busy_s += float(step_s.sum())
        most = self.cost.most
        beyond = {name: np.full(steps, getattr(shape, name) > most.get(name, np.inf))
                  for name in ("generation_requests", "shared_tokens")}
        beyond["cached_tokens"] = cached_tokens > most.get("cached_tokens", np.inf)
        self.beyond.update({name: int(are.sum()) for name, are in beyond.items() if are.any()})
        self.steps_beyond += int(np.logical_or.reduce(list(beyond.values())).sum())
        self.clock.now = self._busy_until = float(ends_s[-1])
        self._log_book.note_run(request_ids, ends_s)

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
