"""The interface of a stage: one change to the logits of a step."""

import numpy as np
import torch

from ..handover import SlotSetup
from .logits_rows import LogitsRows


class LogitsStage:
    """One change to the logits of a step. Its effect on a sequence must not depend on the step's other sequences.

    A custom stage (Parts.stages) may inherit from this class or implement all of its members. While the manager is
    constructed, a warm-up calls the stage with dummy sequences of request id 0 and prompt [0]. One of these sequences
    has the largest number of beams. If a warm-up call raises, the constructor raises ConfigError.

    reads   names of the parameters that the stage reads with `LogitsRows.column`: fields of SamplingConfig, or `end_id`
            or `prompt_length` of SlotSetup
    """

    reads: tuple[str, ...] = ()

    def is_active(self, setup: SlotSetup) -> bool:
        """Whether the stage may change the logits of the sequence.

        In this class: whether a parameter in `reads` differs from its default in SamplingConfig. A stage that reads
        `end_id` or `prompt_length` must override the method.
        """
        return setup.sampling.sets(self.reads)

    def needs_history(self, setup: SlotSetup) -> bool:
        """Whether `apply` reads the tokens of the sequence. Called only if the stage is active for the sequence."""
        return False

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """Set up a sequence in a slot and discard the state of the slot's previous sequence.

        The decoder calls the method even if the stage is not active for the sequence. It calls the method again for the
        same sequence if a step is run again, and when a paused request starts over.
        """

    def apply(self, logits: torch.Tensor, rows: LogitsRows, active: np.ndarray) -> None:
        """Change `logits` [r, vocab] float32 in place.

        rows     describes the sequence of each row of `logits`; a sequence with beams has one row for each beam
        active   [r] bool on the host: the rows for which the stage is active, at least one. Leave other rows unchanged

        Send arrays to the device with `rows.send`. Any other way of copying makes the host wait for the device.

        The decoder calls the method on the engine's thread, in torch.inference_mode. In a step, one call has the rows
        of all sequences with beams, and another call has all other rows. With `deterministic` on a CPU, each call has
        the rows of one sequence. A step may run twice and must give the same result, so do not change the state of the
        stage here. If a call raises, the step is bisected, and only the requests that fail alone end with an error.
        """
        raise NotImplementedError
