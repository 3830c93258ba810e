"""Runs a step, and narrows a failing one down to the sequences that cannot run even alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..contained_log import log
from ..errors import (
    DeviceLostError,
    InsufficientMemoryError,
    InternalError,
    is_a,
    names_of_classes,
    type_name,
    where_raised,
)
from ..forked_child import Fork
from ..handover import BeamOutput, BlockCopy, RowFailure, ScheduledBatch, StepOutput
from ..names import ErrorCode
from ..seams import Clock, ModelBackend, PendingStep
from .step_output_check import StepOutputCheck, WrongOutputError


class StepRunner:
    """Launches batches on a backend; what comes back has one row, or one failure, for every sequence.

    What a backend returns is taken for what it should be, or for a step that raised.

    A batch that raises is run again in halves, and these in halves, so that only sequences that fail alone are lost.
    That is sound because a step that raised left nothing a second run would notice (seams.ModelBackend).

    A launch that raised may have told the device nothing of the block tables, and the parts that are run again may all
    raise likewise. What it had to say may concern sequences of other batches, so the next launch says it first.

    num_failed_steps   launches that raised
    """

    def __init__(self, backend: ModelBackend, vocab_size: int, clock: Clock,
                 heartbeat: Callable[[str, float], None] = lambda activity, now: None) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._check = StepOutputCheck(vocab_size)
        self._clock = clock
        self._heartbeat = heartbeat
        self._fork = Fork()
        self.num_failed_steps = 0
        self._untold: ScheduledBatch | None = None     # the last launch, if it raised, and what those before it said

    def _beat(self, activity: str) -> None:
        now = self._clock.monotonic()
        self._fork.end_the_child()
        self._heartbeat(activity, now)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Carry out what the batch to be started next relies on.

        Raises DeviceLostError or InternalError: the books of the KV cache say already that the content is where it is
        copied to, so there is nothing to fall back on.
        """
        if copies:
            self._beat("copying KV cache blocks")
            try:
                self._backend.copy_blocks(copies)
            except DeviceLostError:
                raise
            except BaseException as error:
                self._fork.end_the_child(error)
                raise InternalError(f"copying KV cache blocks raised {type_name(error)}",
                                    "what the cache holds is not known any more",
                                    "shut the manager down, make a new one, and report the log") from error
            self._beat("loop")

    def start(self, batch: ScheduledBatch) -> "RunningStep":
        """Launch a batch. One that cannot be launched raises when it is waited for. Raises DeviceLostError."""
        self._beat("model step")
        self._check.note(batch)
        try:
            return RunningStep(self, batch, self._launch(batch), None)
        except DeviceLostError:
            raise
        except BaseException as error:
            self._fork.end_the_child(error)
            return RunningStep(self, batch, None, error)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        if self._untold is not None:
            batch = replace(batch, block_table_updates=self._untold.before(batch))
        self._untold = batch
        pending = self._backend.start(batch)
        self._untold = None
        return pending

    def finish(self, step: "RunningStep", later: Sequence[ScheduledBatch] = ()) -> StepOutput:
        """Wait for a step. Raises DeviceLostError when nothing can run any more.

        later   batches that were launched behind it. Where it has to be run again, the block tables stay as they say:
                slots it told of may have been given to others
        """
        try:
            if step.error is not None:
                raise step.error
            output = self._check.checked(step.batch, step.pending.finish())
        except DeviceLostError:
            raise
        except BaseException as error:
            batch = step.batch
            for newer in later:
                batch = replace(batch, block_table_updates=batch.before(newer))
            output = self._narrow_down(batch, error)
        finally:
            self._beat("loop")
        return self._without_invalid_tokens(output)

    def _narrow_down(self, batch: ScheduledBatch, error: BaseException) -> StepOutput:
        self._fork.end_the_child(error)
        self.num_failed_steps += 1
        count = batch.num_sequences
        if count > 1:
            middle = count // 2
            halves = [self._run_again(batch.part(0, middle)), self._run_again(batch.part(middle, count))]
            return StepOutput.merge(halves, batch.micro_batch_id)

        fact = f": {error}" if type(error) is WrongOutputError else ""    # what others say may quote a prompt
        log.error("a step of one sequence raised %s%s\n%s", type_name(error), fact, where_raised(error))
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.MODEL_ERROR
        (slot,) = batch.slots()
        failure = RowFailure(code, f"the model step raised {type_name(error)} for this request alone; the others "
                                   "go on; see the log of the engine")
        return replace(StepOutput.merge([], batch.micro_batch_id), failures={slot: failure})

    def _run_again(self, batch: ScheduledBatch) -> StepOutput:
        self._beat("model step")
        try:
            return self._check.checked(batch, self._launch(batch).finish())
        except DeviceLostError:
            raise
        except BaseException as error:
            return self._narrow_down(batch, error)

    def _without_invalid_tokens(self, output: StepOutput) -> StepOutput:
        invalid = (output.tokens < 0) | (output.tokens >= self._vocab_size)
        slots = output.slots[invalid].tolist() if invalid.any() else []
        slots += [slot for slot, beams in output.beams.items() if self._has_invalid_tokens(beams)]
        if not slots:
            return output
        failures = dict(output.failures)
        for slot in slots:
            failures.setdefault(slot, RowFailure(
                ErrorCode.INVALID_TOKEN, f"the model step chose a token outside 0..{self._vocab_size - 1}; the request "
                "ends here; please report it"))
        return replace(output, failures=failures)

    def _has_invalid_tokens(self, beams: BeamOutput) -> bool:
        chosen = [beams.tokens] if beams.hypotheses is None else [text.tokens for text in beams.hypotheses]
        return any(((tokens < 0) | (tokens >= self._vocab_size)).any() for tokens in chosen)


class RunningStep:
    """A batch that was launched, or failed to be. It is waited for once; its output may be asked for again."""

    __slots__ = ("_runner", "batch", "pending", "error", "_output")

    def __init__(self, runner: StepRunner, batch: ScheduledBatch, pending: PendingStep | None,
                 error: BaseException | None) -> None:
        self._runner, self.batch, self.pending, self.error = runner, batch, pending, error
        self._output: StepOutput | None = None

    def finish(self, later: Sequence[ScheduledBatch] = ()) -> StepOutput:
        if self._output is None:
            self._output = self._runner.finish(self, later)
        return self._output


def is_out_of_memory(error: BaseException) -> bool:
    # torch's classes by name: this side of the house does not import torch.
    return is_a(error, (MemoryError, InsufficientMemoryError)) or "OutOfMemoryError" in names_of_classes(error)
