"""What a plain generation step reads and writes on a device: at addresses that depend on its padded shape alone.

A step is *plain* where each of its rows goes on with one token, and nothing but temperature, top-k, top-p and min-p
says which. `generation_step.py` decides that, and runs it; `graphs.py` replays it.

On the host, where lengths and blocks are known without the device:
    which rows, in which slots, at which positions; the place of each new token in the KV pool; how attention cuts the
    sequences into parts; which entries of the block tables changed
On the device, at one address for the life of the engine:
    the block tables (`resident_tables.py`); numbers and newest tokens of each slot (`decoding/slots.py`); the pool
In each step:
    one copy of the arrays below to one buffer on the device, from pinned memory of a ring (`device.Uploads`); one block
    of results, copied to the host behind the step

The arrays of a step lie behind one another at offsets that follow from its `StepShape`. Rows beyond the batch's are
padding: their slot is one that no sequence has, their length is 0, their token is written nowhere. So whatever runs a
step of some shape makes the same launches with the same arguments for each batch of that shape, and a graph of these
launches can be replayed.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..attention.interface import GenerationInputs
from .device import ALIGNMENT, Uploads

SPARE_CHANGES = 32                 # entries of the block tables that a step can bring beside one for each of its rows
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class StepShape(NamedTuple):
    """What the addresses, sizes and launches of a plain generation step follow from.

    rows       rows, padding included
    is_split   attention may cut sequences into parts
    samples    some rows may be sampled; else each yields the token of its largest logit
    """

    rows: int
    is_split: bool
    samples: bool


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The arrays of a step of one shape on the device. R rows, u changes of the block tables.

    slots           [R] int64
    positions       [R] int64   of the token that each row feeds
    table_entries   [u] int64   entries of the flat block tables, and
    table_blocks    [u] int32   what they become
    attention       see GenerationInputs
    results         [4, R] int32   tokens, finish reasons, whether logits are finite, the bits of log-probs
    """

    slots: torch.Tensor
    positions: torch.Tensor
    table_entries: torch.Tensor
    table_blocks: torch.Tensor
    attention: GenerationInputs
    results: torch.Tensor


class StepInputs:
    """The one buffer on the device that steps read, the one they write, and how both are divided for each shape.

    most_rows      rows of the largest shape
    windows        of attention
    most_parts     (rows) -> rows that a work list of so many sequences has at most, where they may be cut into parts
    block_tables   [rows, m] int32 on the device
    """

    def __init__(self, most_rows: int, windows: tuple[int | None, ...], most_parts, block_tables: torch.Tensor,
                 uploads: Uploads) -> None:
        self._windows, self._most_parts, self._tables, self._uploads = windows, most_parts, block_tables, uploads
        _, num_bytes = _places(self._sections(StepShape(most_rows, True, True)))
        self._staging = np.zeros(num_bytes, np.uint8)
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=block_tables.device)
        self._results = torch.zeros(4 * most_rows, dtype=torch.int32, device=block_tables.device)
        self._shapes: dict[StepShape, tuple[dict[str, np.ndarray], StepTensors, int]] = {}

    def arrays(self, shape: StepShape) -> dict[str, np.ndarray]:
        """The arrays of the next step, by name, to be written whole. They hold what an earlier step left there."""
        return self._of(shape)[0]

    def tensors(self, shape: StepShape) -> StepTensors:
        """The same on the device."""
        return self._of(shape)[1]

    def send(self, shape: StepShape) -> None:
        """Bring what was written in `arrays` to the device, in one copy that the host does not wait for."""
        num_bytes = self._of(shape)[2]
        self._uploads.into(self._there[:num_bytes], self._staging[:num_bytes])

    def _sections(self, shape: StepShape) -> dict[str, tuple[type[np.signedinteger], tuple[int, ...]]]:
        """Type and shape of each array, in the order in which they lie."""
        rows, changes = shape.rows, shape.rows + SPARE_CHANGES
        num_parts = self._most_parts(rows) if shape.is_split else rows
        sections = {name: (np.int64, (rows,)) for name in ("slots", "positions")}
        sections |= {"table_entries": (np.int64, (changes,)), "table_blocks": (np.int32, (changes,))}
        sections |= {name: (np.int32, (rows,)) for name in ("kv_lengths", "table_rows")}
        for index in range(len(self._windows)):
            sections |= {f"work_{index}": (np.int32, (num_parts, 4)), f"starts_{index}": (np.int32, (rows + 1,))}
        return sections

    def _of(self, shape: StepShape) -> tuple[dict[str, np.ndarray], StepTensors, int]:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = self._divide(shape)
        return found

    def _divide(self, shape: StepShape) -> tuple[dict[str, np.ndarray], StepTensors, int]:
        places, num_bytes = _places(self._sections(shape))
        assert num_bytes <= len(self._staging), f"{shape} is larger than the largest shape"
        arrays, there = {}, {}
        for name, (start, dtype, size) in places.items():
            part = slice(start, start + math.prod(size) * dtype.itemsize)
            arrays[name] = self._staging[part].view(dtype).reshape(size)
            there[name] = self._there[part].view(TORCH_DTYPES[dtype]).view(size)
        attention = GenerationInputs(
            kv_lengths=there["kv_lengths"], table_rows=there["table_rows"], block_tables=self._tables,
            is_split=shape.is_split,
            work={window: (there[f"work_{index}"], there[f"starts_{index}"])
                  for index, window in enumerate(self._windows)})
        tensors = StepTensors(
            slots=there["slots"], positions=there["positions"], table_entries=there["table_entries"],
            table_blocks=there["table_blocks"], attention=attention,
            results=self._results[: 4 * shape.rows].view(4, shape.rows))
        return arrays, tensors, num_bytes


def _places(sections) -> tuple[dict[str, tuple[int, np.dtype, tuple[int, ...]]], int]:
    """(name -> (first byte, type, shape), bytes in all)."""
    places, start = {}, 0
    for name, (dtype, size) in sections.items():
        places[name] = start, np.dtype(dtype), size
        start += -(-math.prod(size) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
    return places, start
