"""Runs a step, and narrows a failing one down to the sequences that cannot run even alone."""

from dataclasses import dataclass, replace

from ..contained_log import log
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
from .output_check import Asked, StepOutputCheck, WrongOutputError


@dataclass(slots=True)
class RunningStep:
    """A batch that was launched, or failed to be.

    pending   None where the launch raised
    error     what the launch or the step raised; None so far
    asked     slot -> what its sequence asked for when the batch was launched: the slot may have another owner by the
              time it is read
    """

    batch: ScheduledBatch
    pending: PendingStep | None
    error: BaseException | None
    asked: dict[int, Asked]


class StepRunner:
    """Launches batches on a backend; what comes back has one row, or one failure, for every sequence.

    An invalid StepOutput counts as a step that raised.

    A batch that raises is run again in halves, and these in halves, so that only sequences that fail alone are lost.
    That is sound because a step that raised left nothing a second run would notice (seams.ModelBackend).

    device_work        what is pending for the device goes with every launch until it certainly was done
    num_failed_steps   launches that raised
    """

    def __init__(self, backend: ModelBackend, device_work: DeviceWork, vocab_size: int, guard: Guard) -> None:
        self._backend = backend
        self._device_work = device_work
        self._vocab_size = vocab_size
        self._check = StepOutputCheck(vocab_size)
        self._in_step = guard.raising("model step", passing=DeviceLostError)
        self.num_failed_steps = 0

    def start(self, batch: ScheduledBatch) -> RunningStep:
        """Launch a batch. One that cannot be launched fails when it is read. Raises DeviceLostError."""
        if self._device_work.has_pending:
            batch = self._device_work.attached_to(batch)
        step = RunningStep(batch, None, None, self._check.asked_by(batch))
        try:
            with self._in_step:
                step.pending = self._launch(batch)
        except ForeignCodeError as failure:
            step.error = failure.error
        return step

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        pending = self._backend.start(batch)
        if self._device_work.has_pending:
            self._device_work.launched()
        return pending

    def _finished(self, batch: ScheduledBatch, pending: PendingStep, asked: dict[int, Asked]) -> StepOutput:
        output = pending.finish()
        if batch.operations:
            self._device_work.done(batch)
        return self._check.checked(batch, output, asked)

    def read(self, step: RunningStep) -> StepOutput | None:
        """Wait for a step; None when it failed, and `step.error` is why. Raises DeviceLostError.

        Called once.
        """
        if step.error is None:
            assert step.pending is not None
            try:
                with self._in_step:
                    return self._finished(step.batch, step.pending, step.asked)
            except ForeignCodeError as failure:
                step.error = failure.error
        self.num_failed_steps += 1
        return None

    def run_again(self, batch: ScheduledBatch, asked: dict[int, Asked]) -> StepOutput:
        """Run a batch, and by halves what of it raises. Raises DeviceLostError."""
        batch = self._device_work.attached_to(batch)
        try:
            with self._in_step:
                return self._finished(batch, self._launch(batch), asked)
        except ForeignCodeError as failure:
            self.num_failed_steps += 1
            return self.narrow_down(batch, asked, failure.error)

    def narrow_down(self, batch: ScheduledBatch, asked: dict[int, Asked], error: BaseException) -> StepOutput:
        """Run a batch that raised this error again, in halves. Raises DeviceLostError."""
        count = batch.num_sequences
        if count > 1:
            middle = count // 2
            halves = [self.run_again(batch.take(range(middle)), asked),
                      self.run_again(batch.take(range(middle, count)), asked)]
            return StepOutput.merge(halves, batch.micro_batch_id)

        fact = f": {error}" if type(error) is WrongOutputError else ""    # what others say may quote a prompt
        log.error("a step of one sequence raised %s%s\n%s", type_name(error), fact, where_raised(error))
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.MODEL_ERROR
        (slot,) = batch.slots()
        failure = RowFailure(code, f"the model step raised {type_name(error)} for this request alone; the others "
                                   "go on; see the log of the engine")
        return replace(StepOutput.merge([], batch.micro_batch_id), failures={slot: failure})


def is_out_of_memory(error: BaseException) -> bool:
    # torch's classes by name: this side of the house does not import torch.
    return is_a(error, (MemoryError, InsufficientMemoryError)) or "OutOfMemoryError" in names_of_classes(error)
