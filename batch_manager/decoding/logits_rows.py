"""The argument of stages: rows of logits with their slots, positions and sampling parameters."""

from collections.abc import Sequence

import numpy as np
import torch

from .history import TokenHistory
from .slots import HISTORY, Plane, SamplingRows, SlotState


class LogitsRows:
    """Rows of logits and their sequences, as passed to stages.

    slots, positions                 [r] int32 on the host: slot of each row's sequence, and position of the token to
                                     sample in this sequence
    device_slots, device_positions   [r] int64 on the device: slots and positions
    beams, device_beams              [r] index of the beam within its sequence; None if no sequence has beams
    features                         bitwise or of the feature bits of all rows. Each stage has a bit; slots.py defines
                                     the bits that belong to no stage
    """

    __slots__ = ("slots", "positions", "device_slots", "device_positions", "beams", "device_beams", "features",
                 "_rows", "_state", "_history", "_features", "_gathered", "_replaced")

    def __init__(self, rows: SamplingRows, state: SlotState, history: TokenHistory) -> None:
        self.slots, self.positions, self.beams = rows.slots, rows.positions, rows.beams
        self.device_slots, self.device_positions = rows.device_slots, rows.device_positions
        self.device_beams = rows.device_beams
        self._rows, self._state, self._history = rows, state, history
        self._features = state.features[rows.slots]
        self.features = int(np.bitwise_or.reduce(self._features))
        self._gathered: dict[Plane, torch.Tensor] = {}  # the columns of a plane, [columns, r]
        self._replaced: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.slots)

    def active(self, feature: int) -> np.ndarray:
        """Return [r] bool on the host: whether the bit `feature` (see `features`) is set for each row's sequence."""
        return (self._features & feature) != 0

    def column(self, name: str) -> torch.Tensor:
        """Return the column `name` for the sequence of each row: [r] on the device.

        name   name of a column of SlotState, such as "temperature", "end_id" or "prompt_length"
        """
        return self._replaced[name] if name in self._replaced else self.column_as_set_up(name)

    def on_host(self, name: str) -> np.ndarray:
        """Return each row's value of a parameter, [r] on the host. Ignores values that were set with `replace`."""
        return self._state.host[name][self.slots]

    def column_as_set_up(self, name: str) -> torch.Tensor:
        """Return the values [r] that `column(name)` would return if `replace` had not been called."""
        if self._state.device.type == "cpu":
            return torch.from_numpy(self.on_host(name))
        plane, index, is_float = self._state.locate(name)
        block = self._gathered.get(plane)
        if block is None:                               # all columns of the plane in one launch
            block = self._gathered[plane] = plane.tensor.index_select(1, self.device_slots)
        return block[index].view(torch.float32) if is_float else block[index]

    def columns(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [self.column(name) for name in names]

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Make `column` return `values` [r] for `name`. Affects this object only."""
        self._replaced[name] = values

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, sent in one copy. Does not wait for the copy.

        On a CPU, the tensors share the arrays' memory.
        """
        return self._state.send(arrays)

    def history(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (tokens [h, c] int32, row [r] int64, length [r] int64), on the device.

        The prompt and output of row i of the logits are tokens[row[i], :length[i]]. These tokens are defined only
        if a stage with `needs_history` is active for the sequence.
        """
        return (self._history.up_to(int(self.positions[self.active(HISTORY)].max(initial=0))),
                self._history.device_rows_of(self._rows), self.device_positions)

    def part(self, of: slice) -> "LogitsRows":
        """Return a slice of the rows as a separate LogitsRows, without the values that were set with `replace`."""
        return LogitsRows(self._rows.part(of), self._state, self._history)
