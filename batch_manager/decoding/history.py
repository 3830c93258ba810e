"""Token histories on the device, for the sampling stages and the check for stop words, which read earlier tokens."""

import numpy as np
import torch

from ..handover import SlotSetup
from .slots import SamplingRows, SlotState

COLUMNS_AT_ONCE = 64               # widths are multiples of it, to avoid compiling kernels for other alignments


class TokenHistory:
    """Prompt and output tokens, on the device, of the slots with the feature bit HISTORY. Empty without such slots.

    tokens   [rows, capacity] int32: the token of position p is in column p. The row is the slot or, once a sequence
             with beams has a history, slot * largest beam width + beam; `device_rows_of` computes it. The column of the
             position to sample, all later columns, and rows of slots without a history are undefined.

    A sampled token is written at its position, which makes it safe to run a step twice. A beam that continues
    another beam takes over the output of that beam. In each step, the decoder therefore writes the complete outputs
    of beams before the stages read them. It takes them from the state of the beam search before the step. Capacity
    doubles as needed, for the longest sequence and the largest beam width.
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self.tokens = torch.zeros((0, COLUMNS_AT_ONCE), dtype=torch.int32, device=state.device)
        self._rows_per_slot = 1

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """Set up a sequence with a history in a slot, and store its prompt and any output."""
        assert setup.history is not None, "the setup has no history, but a stage or stop word reads it"
        length, width = len(setup.history), setup.sampling.beam_width
        if width > self._rows_per_slot:
            self._make_room_for_beams(width)
        first = slot * self._rows_per_slot
        self._reserve(first + self._rows_per_slot, length + 1)
        self.tokens[first : first + width, :length] = self._state.send([setup.history])[0]

    def put_outputs(self, slot: int, start: int, outputs: torch.Tensor) -> None:
        """Store the outputs of all beams of the sequence in `slot`. The sequence must have a history.

        start     position of the first output token
        outputs   [beams, n] int32, on the device
        """
        self._reserve(0, start + outputs.shape[1])
        first = slot * self._rows_per_slot
        self.tokens[first : first + len(outputs), start : start + outputs.shape[1]] = outputs

    def device_rows_of(self, rows: SamplingRows) -> torch.Tensor:
        """Return [r] int64 on the device: the row of `tokens` for each row of logits."""
        if self._rows_per_slot == 1:
            return rows.device_slots
        first = rows.device_slots * self._rows_per_slot
        return first if rows.device_beams is None else first + rows.device_beams

    def up_to(self, length: int) -> torch.Tensor:
        """Return the first `length` columns of `tokens`."""
        return self.tokens[:, :length]

    def append(self, rows: SamplingRows, is_kept: np.ndarray, sampled: torch.Tensor) -> None:
        """Store the sampled tokens of the rows for which `is_kept` is true, each at its position.

        Shapes   is_kept [r] bool on the host, at least one true; sampled [r]
        """
        self._reserve(0, int(rows.positions[is_kept].max()) + 1)
        at, positions = self.device_rows_of(rows), rows.device_positions
        if not is_kept.all():
            (chosen,) = self._state.send([np.flatnonzero(is_kept)])
            at, positions, sampled = at[chosen], positions[chosen], sampled[chosen]
        self.tokens[at, positions] = sampled.int()

    def _make_room_for_beams(self, width: int) -> None:
        before, (num_rows, num_columns) = self._rows_per_slot, self.tokens.shape
        tokens = self.tokens.new_zeros((num_rows // before, width, num_columns))
        tokens[:, :before] = self.tokens.view(num_rows // before, before, num_columns)
        self.tokens, self._rows_per_slot = tokens.view(num_rows // before * width, num_columns), width

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        before = self.tokens
        if num_rows <= before.shape[0] and num_columns <= before.shape[1]:
            return
        num_columns = -(-num_columns // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE
        shape = [size if wanted <= size else max(wanted, 2 * size)
                 for wanted, size in zip((num_rows, num_columns), before.shape)]
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=before.device)
        self.tokens[: before.shape[0], : before.shape[1]] = before
