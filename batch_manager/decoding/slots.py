"""State of the sequences on the device, one row per slot; written when a sequence takes a slot, not per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..handover import SlotSetup
from ..sampling_config import PARAMETERS
from .position_ring import COLUMNS as COLUMNS_OF_RING
from .position_ring import PositionRing

# Bits of `SlotState.features`. The lowest ones are the stages', in their order.
MAX_STAGES = 32
STAGES = (1 << MAX_STAGES) - 1
(SAMPLES, LOG_PROBS, CONTEXT_LOGITS, GENERATION_LOGITS, HISTORY, STOP_WORDS, BEAMS, POST_PROCESSED, MORE_END_IDS,
 TOP_LOG_PROBS, RAW_LOG_PROBS) = (1 << bit for bit in range(MAX_STAGES, MAX_STAGES + 11))

# Columns that are no parameter of sampling: of the setup itself.
SETUP_COLUMNS = ("end_id", "prompt_length", "return_log_probs", "top_log_probs")

Send = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Whose token each row of logits yields, on the host and on the device.

    slots       [r]   host int32, device int64
    positions   [r]   position of the token to be sampled, in its sequence; host int32, device int64
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

    def part(self, of: slice) -> "DrawRows":
        """Some of the rows."""
        return DrawRows(self.slots[of], self.positions[of], self.device_slots[of], self.device_positions[of],
                        None if self.beams is None else self.beams[of],
                        None if self.device_beams is None else self.device_beams[of])


class Plane:
    """Columns of one width: `host` [columns, slots] and its copy on the device, which on a CPU is the same memory."""

    def __init__(self, dtype: type[np.signedinteger], capacity: int, device: torch.device) -> None:
        self._device, self.host = device, np.zeros((0, capacity), dtype)
        self.there = torch.from_numpy(self.host)

    def resize(self, num_columns: int, capacity: int) -> None:
        before, self.host = self.host, np.zeros((num_columns, capacity), self.host.dtype)
        self.host[: len(before), : before.shape[1]] = before
        self.there = torch.from_numpy(self.host).to(self._device)


class SlotState:
    """Per slot: the numbers that its sequence is sampled by, which features it has, and its newest tokens.

    features      [slots] int64 on the host: the bits above, for decisions that must not wait for the device
    last_tokens   int64 on the device: the tokens sampled last, by position. A step reads the one before the position
                  that it samples, and the decoder's `keep` writes that
    host          column -> [slots] on the host, a view of its plane
    num_taken     slots up to the last one that a sequence was ever set up in

    Columns are parameters of SamplingConfig under their names, SETUP_COLUMNS, and what parts of decoding add for
    themselves. What is written on the host reaches the device with `upload`: one copy, however many columns and slots.
    Grows by doubling when a larger slot arrives.

    send   brings arrays to the device in one copy; None: one copy each
    """

    def __init__(self, num_slots: int, device: torch.device, send: Send | None = None) -> None:
        self.device = device
        self.send = send or (lambda arrays: [torch.from_numpy(array).to(device) for array in arrays])
        self.features = np.zeros(max(num_slots, 1), np.int64)
        self.last_tokens = PositionRing(torch.zeros((self.capacity, COLUMNS_OF_RING), dtype=torch.int64, device=device))
        self._planes = {4: Plane(np.int32, self.capacity, device), 8: Plane(np.int64, self.capacity, device)}
        self._places: dict[str, tuple[Plane, int, np.dtype]] = {}
        self._neutral: dict[str, int] = {}             # of the columns that parts have added for themselves
        self._changed: list[int] = []                   # slots whose columns the device does not have yet
        self.host: dict[str, np.ndarray] = {}
        self.num_taken = 0
        self.add_columns([*SETUP_COLUMNS, "temperature", "top_k", "top_p"])

    @property
    def capacity(self) -> int:
        return len(self.features)

    def add_columns(self, names: Sequence[str], neutral: int | None = None) -> None:
        """Columns of these names, unless they are there.

        neutral   their value in slots where nothing else is written; None: they are parameters of sampling, or of
                  SETUP_COLUMNS, and have the values of the setup
        """
        for name in names:
            if name in self._places:
                continue
            dtype = np.dtype(PARAMETERS[name].dtype if name in PARAMETERS else np.int32)
            plane = self._planes[dtype.itemsize]
            self._places[name] = plane, len(plane.host), dtype
            plane.resize(len(plane.host) + 1, self.capacity)
            if neutral is not None:
                self._neutral[name] = neutral
        self._look_at_planes()

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """A sequence takes the slot. Doing so again is harmless."""
        if slot >= self.capacity:
            self._grow(slot + 1)
        self.num_taken = max(self.num_taken, slot + 1)
        for name in self._places:
            if name in PARAMETERS:
                value = PARAMETERS[name].stored(getattr(setup.sampling, name))
            else:
                value = self._neutral[name] if name in self._neutral else getattr(setup, name)
            self.host[name][slot] = value
        self.features[slot] = (LOG_PROBS * setup.return_log_probs + CONTEXT_LOGITS * setup.return_context_logits
                               + GENERATION_LOGITS * setup.return_generation_logits + BEAMS * setup.has_beams
                               + POST_PROCESSED * (setup.logits_post_processor is not None)
                               + TOP_LOG_PROBS * (setup.top_log_probs > 0) + RAW_LOG_PROBS * (
                                   setup.raw_log_probs and (setup.return_log_probs or setup.top_log_probs > 0)))
        self.features[slot] |= SAMPLES * self._is_sampled(slot)
        self._changed.append(slot)

    def _is_sampled(self, slot: int) -> bool:
        """As float32 has the numbers: what rounds to 0 there is 0 everywhere."""
        temperature, top_k, top_p = (self.host[name][slot] for name in ("temperature", "top_k", "top_p"))
        return temperature != 0 and top_k != 1 and bool(top_k != 0 or top_p != 0)

    def put(self, slot: int, **values: int) -> None:
        """Write columns of a slot."""
        for name, value in values.items():
            self.host[name][slot] = value
        self._changed.append(slot)

    def upload(self) -> None:
        """Bring what was written to the device."""
        if self._changed and self.device.type != "cpu":
            planes, slots = list(self._planes.values()), np.unique(self._changed)
            there, *parts = self.send([slots.astype(np.int64), *(plane.host[:, slots] for plane in planes)])
            for plane, part in zip(planes, parts):
                plane.there.index_copy_(1, there, part)
        self._changed.clear()

    def place(self, name: str) -> tuple[Plane, int, bool]:
        """(the plane of a column, its index there, whether its numbers are floats)."""
        plane, index, dtype = self._places[name]
        return plane, index, dtype.kind == "f"

    def column(self, name: str) -> torch.Tensor:
        """[slots] on the device: a view, as long as no column or slot is added."""
        plane, index, is_float = self.place(name)
        return plane.there[index].view(torch.float32) if is_float else plane.there[index]

    def active(self, feature: int, slots: np.ndarray) -> np.ndarray:
        """[n] bool: which of the sequences in these slots have a feature."""
        return (self.features[slots] & feature) != 0

    def _look_at_planes(self) -> None:
        """Where the columns are once a plane is another array."""
        self.host = {name: plane.host[index].view(dtype) for name, (plane, index, dtype) in self._places.items()}

    def _grow(self, num_slots: int) -> None:
        capacity, before = max(2 * self.capacity, num_slots), self.capacity
        features, self.features = self.features, np.zeros(capacity, np.int64)
        self.features[:before] = features
        for plane in self._planes.values():
            plane.resize(len(plane.host), capacity)
        self._look_at_planes()
        last_tokens = torch.zeros((capacity, COLUMNS_OF_RING), dtype=torch.int64, device=self.device)
        last_tokens[:before] = self.last_tokens.values
        self.last_tokens.values = last_tokens
