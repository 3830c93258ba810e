"""The tokens of sequences whose logits depend on them in other ways than through the model."""

import numpy as np
import torch

from ..handover import SlotSetup
from .slots import DrawRows

COLUMNS_AT_ONCE = 64               # a width that is a multiple of it: one that is not would make variants of kernels


class TokenHistory:
    """Prompt and generated tokens of the slots that want them kept, on the device; nothing where none does.

    The bit HISTORY of `SlotState.features` says which do.

    tokens   [rows, capacity] int32: the token of position p in column p. A slot's row is the slot; where beams want
             a history, slot * most beams + beam. `device_rows_of` is where that is decided. Columns at
             and after the position that is sampled, and rows of slots without a history, hold anything.

    The token drawn is written at its position, so a step may run twice. What beams hold changes with their parents: it
    is written whole, before each step, by the code that knows where that step began. Grows by doubling, to the longest
    sequence, and to the most beams.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros((0, COLUMNS_AT_ONCE), dtype=torch.int32, device=device)
        self._rows_per_slot = 1

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """A sequence takes the slot and wants its tokens kept: those that it holds so far, and those to come."""
        assert setup.history is not None, "a setup without the tokens that it depends on"
        length, width = len(setup.history), setup.sampling.beam_width
        if width > self._rows_per_slot:
            self._make_room_for_beams(width)
        first = slot * self._rows_per_slot
        self._reserve(first + self._rows_per_slot, length + 1)
        self.tokens[first : first + width, :length] = torch.from_numpy(setup.history)

    def put_texts(self, slot: int, start: int, texts: torch.Tensor) -> None:
        """The beams of a slot that keeps a history hold these tokens from position `start` on.

        texts   [beams, n] int32, on the device
        """
        self._reserve(0, start + texts.shape[1])
        first = slot * self._rows_per_slot
        self.tokens[first : first + len(texts), start : start + texts.shape[1]] = texts

    def device_rows_of(self, rows: DrawRows) -> torch.Tensor:
        """[r] int64 on the device: where the rows' tokens stand."""
        if self._rows_per_slot == 1:
            return rows.device_slots
        first = rows.device_slots * self._rows_per_slot
        return first if rows.device_beams is None else first + rows.device_beams

    def up_to(self, length: int) -> torch.Tensor:
        """The first columns of `tokens`."""
        return self.tokens[:, :length]

    def append(self, rows: DrawRows, is_kept: np.ndarray, sampled: torch.Tensor) -> None:
        """Keep the token sampled for each row whose sequence wants it kept.

        Shapes   is_kept [r] bool on the host, at least one; sampled [r]
        """
        self._reserve(0, int(rows.positions[is_kept].max()) + 1)
        at, positions = self.device_rows_of(rows), rows.device_positions
        if not is_kept.all():
            chosen = torch.from_numpy(np.nonzero(is_kept)[0]).to(sampled.device)
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
