"""Runs a step. A failed one runs again without drafts, and then in parts, to find the sequences that fail alone."""

import logging
from dataclasses import dataclass, replace

from ..contained_log import RateLimitedLog, log
from ..errors import (
    DeviceLostError,
    InsufficientMemoryError,
    is_a,
    names_of_classes,
    type_name,
    where_raised,
)
from ..guard import ForeignCodeError, Guard
from ..handover import RowFailure, ScheduledBatch, StepOutput
from ..names import ErrorCode
from ..seams import ModelBackend, PendingStep
from .device_work import DeviceWork
from .output_check import RequestedValues, StepOutputCheck, WrongOutputError


@dataclass(slots=True)
class RunningStep:
    """A batch after its launch, which may have failed.

    pending     the step to wait for; None if the launch raised
    error       exception of the launch or the step, or None
    requested   slot -> which values were asked for by the request that had this slot at the launch. When the step is
                read, the slot may belong to another request
    """

    batch: ScheduledBatch
    pending: PendingStep | None
    error: BaseException | None
    requested: dict[int, RequestedValues]


class StepRunner:
    """Launches batches on a backend, and returns a row or a failure for every sequence.

    An invalid StepOutput counts as a failed step.

    A failed batch runs again without its drafts, so that no draft costs a sequence. If it has none, it is bisected, so
    that only sequences that fail alone are lost. This is possible because a failed step does not affect a second run
    (seams.ModelBackend).

    device_work        DeviceWork, whose pending work is attached to every launch
    num_failed_steps   number of failed steps, those with drafts and failed parts of a bisected batch included
    """

    def __init__(self, backend: ModelBackend, device_work: DeviceWork, vocab_size: int, guard: Guard) -> None:
        self._backend = backend
        self._device_work = device_work
        self._vocab_size = vocab_size
        self._check = StepOutputCheck(vocab_size)
        self._in_step = guard.raising("model step", passing=DeviceLostError)
        self._log = RateLimitedLog(guard.monotonic)
        self.num_failed_steps = 0

    def figures(self) -> dict[str, int]:
        """Return the statistics of the runner."""
        return {"Failed Steps": self.num_failed_steps}

    def start(self, batch: ScheduledBatch) -> RunningStep:
        """Launch a batch. If the launch fails, `read` reports the failure. Raises DeviceLostError."""
        if self._device_work.has_pending:
            batch = self._device_work.attached_to(batch)
        step = RunningStep(batch, None, None, self._check.requested_by(batch))
        try:
            with self._in_step:
                step.pending = self._launch(batch)
        except ForeignCodeError as failure:
            step.error = failure.error
        return step

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        pending = self._backend.start(batch)
        if not hasattr(pending, "finish"):
            raise WrongOutputError(f"`start` of the backend returned a value of type {type_name(pending)}; expected a "
                                   "step with the method `finish`")
        if self._device_work.has_pending:
            self._device_work.launched()
        return pending

    def _finished(self, batch: ScheduledBatch, pending: PendingStep,
                  requested: dict[int, RequestedValues]) -> StepOutput:
        output = pending.finish()
        if batch.operations:
            self._device_work.done(batch)
        return self._check.checked(batch, output, requested)

    def read(self, step: RunningStep) -> StepOutput | None:
        """Wait for a step and return its output. Call it once for each step.

        Returns None when the step failed; `step.error` is the exception. Raises DeviceLostError.
        """
        if step.error is None:
            assert step.pending is not None
            try:
                with self._in_step:
                    return self._finished(step.batch, step.pending, step.requested)
            except ForeignCodeError as failure:
                step.error = failure.error
        self.num_failed_steps += 1
        return None

    def run_again(self, batch: ScheduledBatch, requested: dict[int, RequestedValues]) -> StepOutput:
        """Run a batch, and bisect it if it fails. Raises DeviceLostError."""
        batch = self._device_work.attached_to(batch)
        try:
            with self._in_step:
                return self._finished(batch, self._launch(batch), requested)
        except ForeignCodeError as failure:
            self.num_failed_steps += 1
            return self.bisect(batch, requested, failure.error)

    def bisect(self, batch: ScheduledBatch, requested: dict[int, RequestedValues], error: BaseException) -> StepOutput:
        """Run the halves of a batch that failed with `error`, and join their outputs. Raises DeviceLostError.

        A batch with drafts is run whole, without them. One sequence without drafts is not run again: the output has a
        RowFailure.
        """
        count = batch.num_sequences
        if batch.has_drafts:
            self._log.log(logging.WARNING, "a step of %d sequences with draft tokens raised %s; it is run again "
                          "without them", count, type_name(error), raised=error)
            return self.run_again(batch.without_drafts(), requested)
        if count > 1:
            self._log.log(logging.WARNING, "a step of %d sequences raised %s; it is bisected, to find the sequences "
                          "that fail alone", count, type_name(error), raised=error)
            middle = count // 2
            halves = [self.run_again(batch.take(range(middle)), requested),
                      self.run_again(batch.take(range(middle, count)), requested)]
            return StepOutput.merge(halves, batch.micro_batch_id)

        fact = f": {error}" if type(error) is WrongOutputError else ""    # other texts may quote a prompt
        log.error("a step of one sequence raised %s%s\n%s", type_name(error), fact, where_raised(error))
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.MODEL_ERROR
        (slot,) = batch.slots()
        failure = RowFailure(code, f"the model step raised {type_name(error)} for this request alone; the other "
                                   "requests go on; see the log of the engine")
        return replace(StepOutput.merge([], batch.micro_batch_id), failures={slot: failure})


def is_out_of_memory(error: BaseException) -> bool:
    # torch's classes by name, because the host tower does not import torch.
    return is_a(error, (MemoryError, InsufficientMemoryError)) or "OutOfMemoryError" in names_of_classes(error)
