"""State of the sequences on the device, one row per slot; written when a sequence takes a slot, not per step."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..handover import SlotSetup
from .position_ring import COLUMNS as COLUMNS_OF_RING
from .position_ring import PositionRing

COLUMNS = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.int64,
    "end_id": np.int32,
}
FLAGS = ("samples", "log_probs", "context_logits", "generation_logits")
SIGN_BIT = 1 << 63


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Whose token each row of logits yields, on the host and on the device.

    slots       [r]   host int32, device int64
    positions   [r]   position of the token to be drawn, in its sequence; host int32, device int64
    beams       [r]   which beam of its sequence a row is, likewise; None: each is the only one
    """

    slots: np.ndarray
    positions: np.ndarray
    device_slots: torch.Tensor
    device_positions: torch.Tensor
    beams: np.ndarray | None = None
    device_beams: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def one(self, row: int) -> "DrawRows":
        """A row alone, of those without beams."""
        only = slice(row, row + 1)
        return DrawRows(self.slots[only], self.positions[only], self.device_slots[only], self.device_positions[only])


def decays(setup: SlotSetup) -> bool:
    """Whether top_p ever changes."""
    sampling = setup.sampling
    return sampling.top_p > 0 and (sampling.top_p_decay != 1 or sampling.top_p_min > sampling.top_p)


def penalizes(setup: SlotSetup) -> bool:
    """Whether a token is less, or more, likely because the sequence holds it."""
    return setup.sampling.sets(("repetition_penalty", "presence_penalty", "frequency_penalty"))


def changes_logits(setup: SlotSetup) -> bool:
    """Whether a stage may change its logits."""
    return bool(penalizes(setup) or setup.sampling.no_repeat_ngram_size or setup.bad_words
                or setup.embedding_bias is not None or (setup.sampling.min_length > 0 and setup.end_id >= 0))


def wants_history(setup: SlotSetup) -> bool:
    """Whether what is sampled depends on the tokens before it other than through the model."""
    return bool(penalizes(setup) or decays(setup) or setup.sampling.no_repeat_ngram_size
                or any(len(word) > 1 for words in (setup.bad_words, setup.stop_words) for word in words))


class SlotState:
    """Per slot: the sampling parameters, what is to be returned, and the tokens drawn last.

    host          the columns of COLUMNS and FLAGS as numpy arrays, for decisions that must not wait for the device
    last_tokens   int64 on the device: the tokens sampled last, by position. A step reads the one before the position
                  that it samples and writes that

    Grows by doubling when a larger slot arrives.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.host = {name: np.zeros(max(num_slots, 1), dtype)
                     for name, dtype in {**COLUMNS, **dict.fromkeys(FLAGS, np.bool_)}.items()}
        self.last_tokens = PositionRing(torch.zeros((self.capacity, COLUMNS_OF_RING), dtype=torch.int64, device=device))
        self._columns = self._upload()

    @property
    def capacity(self) -> int:
        return len(self.host["seed"])

    def set_up(self, setups: Iterable[tuple[int, SlotSetup]]) -> None:
        """Sequences take their slots. Doing so again is harmless."""
        slots = []
        for slot, setup in setups:
            if slot >= self.capacity:
                self._grow(slot + 1)
            self._write(slot, setup)
            slots.append(slot)
        if slots and self.device.type != "cpu":
            rows = torch.tensor(slots, dtype=torch.int64, device=self.device)
            for name, column in self._columns.items():
                column[rows] = torch.from_numpy(self.host[name][slots]).to(self.device)

    def column(self, name: str, rows: DrawRows) -> torch.Tensor:
        """Values of a column of COLUMNS for the rows, on the device."""
        return self._columns[name][rows.device_slots]

    def fed_tokens(self, device_slots: torch.Tensor, device_positions: torch.Tensor) -> torch.Tensor:
        """[g] int64: the tokens that stand at these positions, drawn by the step before."""
        return self.last_tokens.at(device_slots, device_positions)

    def keep_tokens(self, rows: DrawRows, tokens: torch.Tensor) -> None:
        """Store what was drawn; the next step is fed it."""
        self.last_tokens.put(rows.device_slots, rows.device_positions, tokens.long())

    def _write(self, slot: int, setup: SlotSetup) -> None:
        host = self.host
        host["temperature"][slot] = setup.sampling.temperature
        host["top_k"][slot] = setup.sampling.top_k
        host["top_p"][slot] = setup.sampling.top_p
        host["min_p"][slot] = setup.sampling.min_p
        host["seed"][slot] = (setup.sampling.random_seed ^ SIGN_BIT) - SIGN_BIT              # the same 64 bits, signed
        host["end_id"][slot] = setup.end_id
        # As float32 has them: what rounds to 0 is 0 for everybody.
        host["samples"][slot] = not (
            host["temperature"][slot] == 0 or setup.sampling.top_k == 1
            or (setup.sampling.top_k == 0 and host["top_p"][slot] == 0))
        host["log_probs"][slot] = setup.return_log_probs
        host["context_logits"][slot] = setup.return_context_logits
        host["generation_logits"][slot] = setup.return_generation_logits

    def _grow(self, num_slots: int) -> None:
        capacity, before = max(2 * self.capacity, num_slots), self.capacity
        for name, column in self.host.items():
            self.host[name] = np.zeros(capacity, column.dtype)
            self.host[name][:before] = column
        last_tokens = torch.zeros((capacity, COLUMNS_OF_RING), dtype=torch.int64, device=self.device)
        last_tokens[:before] = self.last_tokens.values
        self.last_tokens.values, self._columns = last_tokens, self._upload()

    def _upload(self) -> dict[str, torch.Tensor]:
        # On a CPU the tensors are the host's arrays.
        return {name: torch.from_numpy(self.host[name]).to(self.device) for name in COLUMNS}
