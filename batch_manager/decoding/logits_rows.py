"""Rows of logits, the sequences they belong to, and the numbers of these: what stages are given."""

from collections.abc import Sequence

import numpy as np
import torch

from .history import TokenHistory
from .slots import HISTORY, DrawRows, Plane, SlotState


class LogitsRows:
    """Rows of logits and the sequences they belong to, as stages see them.

    slots, positions                 [r] int32 on the host: the slot of each row's sequence, and the position in it of
                                     the token to be sampled
    device_slots, device_positions   [r] int64 on the device: the same
    beams, device_beams              which beam of its sequence a row is; None: each is the only one
    draw_rows                        the same without the numbers
    features                         the bits of slots.py that any of the rows has
    """

    __slots__ = ("slots", "positions", "device_slots", "device_positions", "beams", "device_beams", "features",
                 "draw_rows", "_state", "_history", "_features", "_gathered", "_replaced")

    def __init__(self, rows: DrawRows, state: SlotState, history: TokenHistory) -> None:
        self.slots, self.positions, self.beams = rows.slots, rows.positions, rows.beams
        self.device_slots, self.device_positions = rows.device_slots, rows.device_positions
        self.device_beams = rows.device_beams
        self.draw_rows, self._state, self._history = rows, state, history
        self._features = state.features[rows.slots]
        self.features = int(np.bitwise_or.reduce(self._features))
        self._gathered: dict[Plane, torch.Tensor] = {}  # the columns of a plane, [columns, r]
        self._replaced: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.slots)

    def active(self, feature: int) -> np.ndarray:
        """[r] bool on the host: which rows have a feature."""
        return (self._features & feature) != 0

    def column(self, name: str) -> torch.Tensor:
        """[r] on the device: a parameter of sampling, or `end_id` or `prompt_length`, of each row's sequence."""
        return self._replaced[name] if name in self._replaced else self.column_as_set_up(name)

    def on_host(self, name: str) -> np.ndarray:
        """[r] on the host: a column as it was set up."""
        return self._state.host[name][self.slots]

    def column_as_set_up(self, name: str) -> torch.Tensor:
        """The same, whatever has replaced it in this step."""
        if self._state.device.type == "cpu":
            return torch.from_numpy(self.on_host(name))
        plane, index, is_float = self._state.place(name)
        block = self._gathered.get(plane)
        if block is None:                               # all columns in one launch
            block = self._gathered[plane] = plane.there.index_select(1, self.device_slots)
        return block[index].view(torch.float32) if is_float else block[index]

    def columns(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [self.column(name) for name in names]

    def replace(self, name: str, values: torch.Tensor) -> None:
        """What comes after this finds these values [r] in the column, in this step."""
        self._replaced[name] = values

    def history(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens [h, c] int32, row [r] int64, length [r] int64): row i's sequence holds tokens[row[i], :length[i]].

        Of sequences for which a stage that is active needs it; the numbers of other rows mean nothing.
        """
        return (self._history.up_to(int(self.positions[self.active(HISTORY)].max(initial=0))),
                self._history.device_rows_of(self.draw_rows), self.device_positions)

    def part(self, of: slice) -> "LogitsRows":
        """Some of the rows, as if they were the step."""
        return LogitsRows(self.draw_rows.part(of), self._state, self._history)
