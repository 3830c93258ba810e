"""What a stage is: one change of the logits of a step, for the sequences that it is active for."""

import numpy as np
import torch

from ..handover import SlotSetup
from .logits_rows import LogitsRows


class LogitsStage:
    """One change of logits, the same for a sequence whatever else is in the step.

    A stage of your own (Parts.stages) may inherit this, or have all of these members. Before there are requests a
    warm-up calls it with sequences that it invents, of request id 0 and prompt [0], one of them with as many beams as
    there may be; where one of these calls raises, the manager is not made.

    reads   fields of SamplingConfig whose numbers it takes from `LogitsRows.column`; `end_id` and `prompt_length` of
            the setup may be among them
    """

    reads: tuple[str, ...] = ()

    def is_active(self, setup: SlotSetup) -> bool:
        """Whether the stage may change the logits of this sequence. By default: any number it reads is not neutral."""
        return setup.sampling.sets(self.reads)

    def needs_history(self, setup: SlotSetup) -> bool:
        """Whether `apply` looks at the tokens of this sequence, which it is active for."""
        return False

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """A sequence takes the slot, active or not; whatever the stage keeps of the one before is gone. Called again
        where a step is run again, and after a pause.
        """

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        """Change `logits` [r, vocab] float32 in place.

        rows     the sequences that the rows of logits belong to; a sequence with beams has a row for each
        active   [r] bool on the host: the rows that the stage is active for, at least one. The others stay as they are

        Called once a step, on the engine's thread, in torch.inference_mode. A step may run twice, and must come to the
        same: what is kept here must not change. With `deterministic` on a CPU each call has the rows of one sequence.
        A raise fails the step, which is narrowed down to the sequences that cannot run even alone.
        """
        raise NotImplementedError
