"""Per-slot sampling state on the device. The parameters are written when a sequence gets a slot, not in each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..handover import SlotSetup
from ..sampling_config import PARAMETERS
from .position_ring import PositionRing, columns_for

# Bits of `SlotState.features`. The lowest bits belong to the stages, in their order.
MAX_STAGES = 32
STAGES = (1 << MAX_STAGES) - 1
(SAMPLES, LOG_PROBS, CONTEXT_LOGITS, GENERATION_LOGITS, HISTORY, STOP_WORDS, BEAMS, POST_PROCESSED, MORE_END_IDS,
 TOP_LOG_PROBS, RAW_LOG_PROBS, ADAPTER) = (1 << bit for bit in range(MAX_STAGES, MAX_STAGES + 12))

# Columns with fields of SlotSetup itself. The other columns are fields of its SamplingConfig.
SETUP_COLUMNS = ("end_id", "prompt_length", "return_log_probs", "top_log_probs")

Send = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]


def share(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return CPU tensors that share the memory of the arrays. This is the default of `SlotState.send`."""
    return list(map(torch.from_numpy, arrays))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Rows of logits to sample from, with the slot and position of each row on the host and on the device.

    slots       [r]   slot of the row's sequence; host int32, device int64
    positions   [r]   position, in its sequence, of the token to sample; host int32, device int64
    beams       [r]   index of the beam within its sequence; host and device int64; None: no row is for a beam, or
                      `BeamRows.of` has not split the rows yet
    """

    slots: np.ndarray
    positions: np.ndarray
    device_slots: torch.Tensor
    device_positions: torch.Tensor
    beams: np.ndarray | None = None
    device_beams: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, of: slice) -> "SamplingRows":
        """Return the rows in the slice `of`."""
        return SamplingRows(self.slots[of], self.positions[of], self.device_slots[of], self.device_positions[of],
                            None if self.beams is None else self.beams[of],
                            None if self.device_beams is None else self.device_beams[of])


class Plane:
    """All columns of SlotState whose elements have the same size, in one array.

    host     [columns, slots] on the host
    tensor   the copy on the device; on a CPU it shares the memory of `host`
    """

    def __init__(self, dtype: type[np.signedinteger], capacity: int, device: torch.device) -> None:
        self.host = np.zeros((0, capacity), dtype)
        self.tensor = torch.zeros(self.host.shape, dtype=torch.from_numpy(self.host).dtype, device=device)

    def resize(self, num_columns: int, capacity: int) -> None:
        """Add columns and slots, with zeros on the host and on the device."""
        host, tensor = self.host, self.tensor
        self.host = np.zeros((num_columns, capacity), host.dtype)
        self.host[: len(host), : host.shape[1]] = host
        if tensor.device.type == "cpu":
            self.tensor = torch.from_numpy(self.host)
        else:
            self.tensor = tensor.new_zeros(self.host.shape)
            self.tensor[: len(host), : host.shape[1]] = tensor


class SlotState:
    """Sampling parameters, feature bits and newest tokens of the sequence in each slot.

    features      [slots] int64 on the host: the bits defined in this file, and one bit for each stage. Readable without
                  waiting for the device
    last_tokens   int64 on the device: the newest tokens of each slot, stored by position (see PositionRing). A step
                  reads the token before the position that it samples; `GptDecoder.keep` stores the sampled token
    host          column name -> [slots] on the host, a view of the array that has the column (see Plane)
    num_taken     1 + the highest number of a slot that was ever set up
    adapters      slot -> the pages with the adapter of its sequence, for sequences with the bit ADAPTER

    The columns are parameters of SamplingConfig, the fields of SlotSetup that SETUP_COLUMNS lists, and columns that
    stages and word lists add. `upload` sends all changes to the device in one copy. Capacity at least doubles
    when a new slot does not fit.

    send               function that uploads arrays in one copy. It does not wait for the copy
    max_draft_tokens   most draft tokens of a sequence in a step
    """

    def __init__(self, num_slots: int, device: torch.device, send: Send = share, max_draft_tokens: int = 0) -> None:
        self.device, self.send = device, send
        self.features = np.zeros(max(num_slots, 1), np.int64)
        self.last_tokens = PositionRing(
            torch.zeros((self.capacity, columns_for(max_draft_tokens)), dtype=torch.int64, device=device))
        self._planes = {4: Plane(np.int32, self.capacity, device), 8: Plane(np.int64, self.capacity, device)}
        self._columns: dict[str, tuple[Plane, int, np.dtype]] = {}
        self._neutral: dict[str, int] = {}             # column -> the value that `set_up` writes
        self._changed: list[int] = []                   # slots with columns to upload
        self.host: dict[str, np.ndarray] = {}
        self.num_taken = 0
        self.adapters: dict[int, tuple[int, ...]] = {}
        self.add_columns([*SETUP_COLUMNS, "temperature", "top_k", "top_p"])

    @property
    def capacity(self) -> int:
        return len(self.features)

    def add_columns(self, names: Sequence[str], neutral: int | None = None) -> None:
        """Add a column for each of `names` that has no column yet.

        neutral   value that `set_up` writes; None: the columns are named after fields of SamplingConfig or SlotSetup,
                  and `set_up` writes the sequence's values of these fields
        """
        for name in names:
            if name in self._columns:
                continue
            dtype = np.dtype(PARAMETERS[name].dtype if name in PARAMETERS else np.int32)
            plane = self._planes[dtype.itemsize]
            self._columns[name] = plane, len(plane.host), dtype
            plane.resize(len(plane.host) + 1, self.capacity)
            if neutral is not None:
                self._neutral[name] = neutral
        self._refresh_views()

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """Set up a sequence in a slot. Idempotent."""
        if slot >= self.capacity:
            self._grow(slot + 1)
        self.num_taken = max(self.num_taken, slot + 1)
        for name in self._columns:
            if name in PARAMETERS:
                value = PARAMETERS[name].stored(getattr(setup.sampling, name))
            else:
                value = self._neutral[name] if name in self._neutral else getattr(setup, name)
            self.host[name][slot] = value
        self.features[slot] = (LOG_PROBS * setup.return_log_probs + CONTEXT_LOGITS * setup.return_context_logits
                               + GENERATION_LOGITS * setup.return_generation_logits + BEAMS * setup.has_beams
                               + POST_PROCESSED * (setup.logits_post_processor is not None)
                               + ADAPTER * bool(setup.adapter_pages)
                               + TOP_LOG_PROBS * (setup.top_log_probs > 0) + RAW_LOG_PROBS * (
                                   setup.raw_log_probs and (setup.return_log_probs or setup.top_log_probs > 0)))
        if setup.adapter_pages:
            self.adapters[slot] = setup.adapter_pages
        self.features[slot] |= SAMPLES * self._is_sampled(slot)
        self._changed.append(slot)

    def _is_sampled(self, slot: int) -> bool:
        """Whether the tokens of the sequence in a slot are sampled at random, and not greedily."""
        temperature, top_k, top_p = (self.host[name][slot] for name in ("temperature", "top_k", "top_p"))
        return temperature != 0 and top_k != 1 and bool(top_k != 0 or top_p != 0)

    def put(self, slot: int, **values: int) -> None:
        """Set columns of a slot, passed as name=value. The device has the values after the next `upload`."""
        for name, value in values.items():
            self.host[name][slot] = value
        self._changed.append(slot)

    def upload(self) -> None:
        """Copy all columns of the changed slots to the device."""
        if self._changed and self.device.type != "cpu":
            planes, slots = list(self._planes.values()), np.unique(self._changed)
            device_slots, *parts = self.send([slots.astype(np.int64), *(plane.host[:, slots] for plane in planes)])
            for plane, part in zip(planes, parts):
                plane.tensor.index_copy_(1, device_slots, part)
        self._changed.clear()

    def locate(self, name: str) -> tuple[Plane, int, bool]:
        """Return the plane that has column `name`, the column's index in the plane, and whether it has floats."""
        plane, index, dtype = self._columns[name]
        return plane, index, dtype.kind == "f"

    def column(self, name: str) -> torch.Tensor:
        """Return a column [slots] on the device: a view, valid until a column or slot is added."""
        plane, index, is_float = self.locate(name)
        return plane.tensor[index].view(torch.float32) if is_float else plane.tensor[index]

    def active(self, feature: int, slots: np.ndarray) -> np.ndarray:
        """Return [n] bool: whether the sequence in each slot of `slots` [n] has the feature."""
        return (self.features[slots] & feature) != 0

    def _refresh_views(self) -> None:
        """Recreate the host views of the columns, after planes were reallocated."""
        self.host = {name: plane.host[index].view(dtype) for name, (plane, index, dtype) in self._columns.items()}

    def _grow(self, num_slots: int) -> None:
        capacity, before = max(2 * self.capacity, num_slots), self.capacity
        features, self.features = self.features, np.zeros(capacity, np.int64)
        self.features[:before] = features
        for plane in self._planes.values():
            plane.resize(len(plane.host), capacity)
        self._refresh_views()
        last_tokens = self.last_tokens.values.new_zeros((capacity, self.last_tokens.values.shape[1]))
        last_tokens[:before] = self.last_tokens.values
        self.last_tokens.values = last_tokens
