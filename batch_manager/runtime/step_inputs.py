"""What a plain step reads and writes on a device: at addresses that depend on its padded shape alone.

A step is *plain* where each sequence goes on with one token or feeds a part of its prompt, and nothing but temperature,
top-k, top-p and min-p says which token is drawn. `plain_steps.py` decides that, and runs it; `graphs.py` replays it.

On the host, where lengths and blocks are known without the device:
    which rows, in which slots, at which positions; the tokens of contexts, and their places in the KV pool; how
    attention cuts the sequences up; which entries of the block tables changed
On the device, at one address for the life of the engine:
    the block tables (`resident_tables.py`); numbers and newest tokens of each slot (`decoding/slots.py`); the pool
In each step:
    one copy of the arrays below to one buffer on the device, from pinned memory of a ring (`device.Uploads`); one block
    of results, copied to the host after the step

The arrays of a step lie one after another at offsets that follow from its `StepShape`. Generation rows come first and
contexts after all of them, padding included: both begin at rows that the shape gives. Rows beyond the batch's are
padding: their slot is one that no sequence has, their length is 0, their token is written nowhere. So whatever runs a
step of some shape makes the same launches with the same arguments for each batch of that shape, and a graph of these
launches can be replayed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.interface import BindableAttention, ContextInputs, GenerationInputs
from .device import ALIGNMENT, Uploads
from .graph_shapes import StepShape

SPARE_CHANGES = 32                 # entries of the block tables that a step can bring beside those its tokens need
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The arrays of a step of one shape on the device. R generation rows, T context tokens of C sequences, u changes of
    the block tables.

    slots           [R + C] int64   of the tokens that are drawn
    drawn_at        [R + C] int32   their positions
    positions       [R + T] int64   of the input tokens
    table_entries   [u] int64   entries of the flat block tables, and
    table_blocks    [u] int32   what they become
    generation      see GenerationInputs
    input_tokens      [T] int64   of contexts
    draw_rows       [R + C] int64   after which tokens others are sampled; None: after each
    contexts        see ContextInputs; None: T is 0
    results         [4, R + C] int32   tokens, finish reasons, whether logits are finite, the bits of log-probs
    context_sums    [T] float32   of the hidden states of each context token: not finite where one of them is not
    read_back       [4 * (R + C) + T] int32   results, then the bits of the sums
    """

    slots: torch.Tensor
    drawn_at: torch.Tensor
    positions: torch.Tensor
    table_entries: torch.Tensor
    table_blocks: torch.Tensor
    generation: GenerationInputs
    input_tokens: torch.Tensor
    draw_rows: torch.Tensor | None
    contexts: ContextInputs | None
    results: torch.Tensor
    context_sums: torch.Tensor
    read_back: torch.Tensor


class StepInputs:
    """The one buffer on the device that steps read, the one they write, and how both are divided for each shape.

    largest        of the shapes that there will be, those with most of anything
    attention      which says how large its work lists may be
    block_tables   [rows, m] int32 on the device
    """

    def __init__(self, largest: Sequence[StepShape], attention: BindableAttention, block_tables: torch.Tensor,
                 tokens_per_block: int, uploads: Uploads) -> None:
        self._attention, self._tables, self._uploads = attention, block_tables, uploads
        self._tokens_per_block = tokens_per_block
        num_bytes = max(_places(self._sections(shape))[1] for shape in largest)
        self._staging = np.zeros(num_bytes, np.uint8)
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=block_tables.device)
        self._results = torch.zeros(max(_num_results(shape) for shape in largest), dtype=torch.int32,
                                    device=block_tables.device)
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
        rows, draws, tokens = shape.rows, shape.num_draws, shape.context_tokens
        changes = draws + tokens // self._tokens_per_block + SPARE_CHANGES
        num_parts = self._attention.most_parts(rows, self._tables.shape[1]) if shape.is_split else rows
        sections = {"slots": (np.int64, (draws,)), "positions": (np.int64, (shape.num_tokens,)),
                    "table_entries": (np.int64, (changes,)), "table_blocks": (np.int32, (changes,)),
                    "kv_lengths": (np.int32, (draws,)), "table_rows": (np.int32, (draws,))}
        for index in range(len(self._attention.windows)):
            sections |= {f"work_{index}": (np.int32, (num_parts, 4)), f"starts_{index}": (np.int32, (rows + 1,))}
        if tokens:
            sections |= {name: (np.int64, (tokens,)) for name in ("input_tokens", "pool_slots")}
            sections |= {"draw_rows": (np.int64, (draws,)), "query_starts": (np.int32, (shape.contexts + 1,)),
                         "context_work": (np.int32, self._attention.most_context_work(tokens, shape.contexts))}
        return sections

    def _of(self, shape: StepShape) -> tuple[dict[str, np.ndarray], StepTensors, int]:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = self._divide(shape)
        return found

    def _divide(self, shape: StepShape) -> tuple[dict[str, np.ndarray], StepTensors, int]:
        places, num_bytes = _places(self._sections(shape))
        assert num_bytes <= len(self._staging) and _num_results(shape) <= len(self._results), (
            f"{shape} is larger than the largest shape")
        arrays, there = {}, {}
        for name, (start, dtype, size) in places.items():
            part = slice(start, start + math.prod(size) * dtype.itemsize)
            arrays[name] = self._staging[part].view(dtype).reshape(size)
            there[name] = self._there[part].view(TORCH_DTYPES[dtype]).view(size)
        rows, draws = shape.rows, shape.num_draws
        kv_lengths, table_rows, positions = there["kv_lengths"], there["table_rows"], there["positions"]
        generation = GenerationInputs(
            kv_lengths=kv_lengths[:rows], table_rows=table_rows[:rows], block_tables=self._tables,
            work={window: (there[f"work_{index}"], there[f"starts_{index}"] if shape.is_split else None)
                  for index, window in enumerate(self._attention.windows)})
        contexts = ContextInputs(
            positions=positions[rows:], pool_slots=there["pool_slots"], query_starts=there["query_starts"],
            kv_lengths=kv_lengths[rows:], table_rows=table_rows[rows:], block_tables=self._tables,
            work=there["context_work"]) if shape.context_tokens else None
        read_back = self._results[: _num_results(shape)]
        tensors = StepTensors(
            slots=there["slots"], drawn_at=kv_lengths, positions=positions, table_entries=there["table_entries"],
            table_blocks=there["table_blocks"], generation=generation,
            input_tokens=there.get("input_tokens", positions[:0]), draw_rows=there.get("draw_rows"), contexts=contexts,
            results=read_back[: 4 * draws].view(4, draws), context_sums=read_back[4 * draws :].view(torch.float32),
            read_back=read_back)
        return arrays, tensors, num_bytes


def _num_results(shape: StepShape) -> int:
    return 4 * shape.num_draws + shape.context_tokens


def _places(sections) -> tuple[dict[str, tuple[int, np.dtype, tuple[int, ...]]], int]:
    """(name -> (first byte, type, shape), bytes in all)."""
    places, start = {}, 0
    for name, (dtype, size) in sections.items():
        places[name] = start, np.dtype(dtype), size
        start += -(-math.prod(size) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
    return places, start
