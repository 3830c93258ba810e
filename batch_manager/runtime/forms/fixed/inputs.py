"""Inputs and results of plain steps, in device memory whose addresses depend on the padded shape only.

A step is *plain* if each sequence generates one token or computes a chunk of its prompt, and if temperature, top-k,
top-p and min-p alone determine the sampled tokens. `plain_steps.py` checks these conditions and runs the step;
`graph/form.py` replays its launches.

Computed on the host, without waiting for the device:
    slots and positions of the rows; tokens of the contexts and their entries in the KV cache pool; the work lists of
    attention; changed entries of the block tables
On the device, at a fixed address while the engine lives:
    the block tables; sampling parameters and newest tokens of each slot (`decoding/slots.py`);
    the KV cache pool
In each step:
    one copy of all arrays to one buffer on the device, from a ring of pinned memory (`device.Uploads`); one copy of all
    results to the host

The arrays follow one another at offsets that the `StepShape` determines. Generation rows come first, then contexts,
each with its padding, so that both start at rows that the shape determines. A padding row has a slot that no sequence
uses and length 0, and its token is not stored. All steps of a shape therefore make the same launches with the same
arguments, and a graph of these launches can be replayed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....attention.interface import BindableAttention, ContextInputs, GenerationInputs
from ....triton_kernels.context_work_list import WORK_COLUMNS
from ...device.running import ALIGNMENT, Uploads
from .shapes import StepShape

SPARE_CHANGES = 32                 # block table entries that a step can change beyond those for its own tokens
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The device arrays of a step of one shape.

    The step has R generation rows, T context tokens of C contexts, and u changes of the block tables.

    slots               [R + C] int64   slot of the sequence of each token to sample
    sampled_positions   [R + C] int32   positions of the tokens to sample
    positions           [R + T] int64   positions of the input tokens
    table_entries       [u] int64   indices of the changed entries in the flattened block tables
    table_blocks        [u] int32   new values of these entries
    generation          see GenerationInputs
    input_tokens        [T] int64   tokens of the contexts
    logits_rows         [R + C] int64   rows of hidden states to sample from; None if T is 0: sample from all rows
    contexts            see ContextInputs; None if T is 0
    results             [4, R + C] int32   tokens, finish reasons, whether logits are finite, bits of the log-probs
    context_sums        [T] float32   sum of each context token's hidden state; not finite if any of its values is not
    read_back           [4 * (R + C) + T] int32   results, then the bits of the sums
    """

    slots: torch.Tensor
    sampled_positions: torch.Tensor
    positions: torch.Tensor
    table_entries: torch.Tensor
    table_blocks: torch.Tensor
    generation: GenerationInputs
    input_tokens: torch.Tensor
    logits_rows: torch.Tensor | None
    contexts: ContextInputs | None
    results: torch.Tensor
    context_sums: torch.Tensor
    read_back: torch.Tensor


class StepInputs:
    """The input buffer and the result buffer of all steps on the device, divided into arrays for each shape.

    largest        the shapes that need the largest buffers
    attention      the attention whose work lists are among the arrays
    block_tables   [rows, blocks] int32 on the device: the block table of each sequence
    """

    def __init__(self, largest: Sequence[StepShape], attention: BindableAttention, block_tables: torch.Tensor,
                 tokens_per_block: int, uploads: Uploads) -> None:
        self._attention, self._tables, self._uploads = attention, block_tables, uploads
        self._tokens_per_block = tokens_per_block
        num_bytes = max(_offsets(self._sections(shape))[1] for shape in largest)
        self._staging = np.zeros(num_bytes, np.uint8)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=block_tables.device)
        self._results = torch.zeros(max(_num_results(shape) for shape in largest), dtype=torch.int32,
                                    device=block_tables.device)
        self._shapes: dict[StepShape, tuple[dict[str, np.ndarray], StepTensors, int]] = {}

    def arrays(self, shape: StepShape) -> dict[str, np.ndarray]:
        """Return name -> host array for the next step of `shape`. The arrays contain old values: write every entry."""
        return self._of(shape)[0]

    def tensors(self, shape: StepShape) -> StepTensors:
        """Return the device arrays of steps of `shape`. They stay at the same addresses."""
        return self._of(shape)[1]

    def send(self, shape: StepShape) -> None:
        """Start copying the arrays of `arrays(shape)` to the device, in one copy. Does not wait for the copy."""
        num_bytes = self._of(shape)[2]
        self._uploads.into(self._buffer[:num_bytes], self._staging[:num_bytes])

    def _sections(self, shape: StepShape) -> dict[str, tuple[type[np.signedinteger], tuple[int, ...]]]:
        """Return name -> (dtype, shape) of each array, in memory order."""
        rows, sampled, tokens = shape.rows, shape.num_sampled, shape.context_tokens
        changes = sampled + tokens // self._tokens_per_block + SPARE_CHANGES
        num_parts = self._attention.most_parts(rows, self._tables.shape[1]) if shape.is_split else rows
        sections = {"slots": (np.int64, (sampled,)), "positions": (np.int64, (shape.num_tokens,)),
                    "table_entries": (np.int64, (changes,)), "table_blocks": (np.int32, (changes,)),
                    "kv_lengths": (np.int32, (sampled,)), "table_rows": (np.int32, (sampled,))}
        for index in range(len(self._attention.windows)):
            sections |= {f"work_{index}": (np.int32, (num_parts, 4)), f"starts_{index}": (np.int32, (rows + 1,))}
        if tokens:
            sections |= {name: (np.int64, (tokens,)) for name in ("input_tokens", "pool_slots")}
            sections |= {"logits_rows": (np.int64, (sampled,)), "query_starts": (np.int32, (shape.contexts + 1,))}
            most = self._attention.most_context_work(tokens, shape.contexts, self._tables.shape[1], shape.is_split)
            for index in range(len(self._attention.windows)):
                sections |= {f"context_work_{index}": (np.int32, (most.rows, WORK_COLUMNS)),
                             f"context_starts_{index}": (np.int32, (most.split + 1,)),
                             f"merged_rows_{index}": (np.int32, (most.split,))}
        return sections

    def _of(self, shape: StepShape) -> tuple[dict[str, np.ndarray], StepTensors, int]:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = self._divide(shape)
        return found

    def _divide(self, shape: StepShape) -> tuple[dict[str, np.ndarray], StepTensors, int]:
        offsets, num_bytes = _offsets(self._sections(shape))
        assert num_bytes <= len(self._staging) and _num_results(shape) <= len(self._results), (
            f"{shape} is larger than the largest shape")
        arrays, tensors = {}, {}
        for name, (start, dtype, size) in offsets.items():
            part = slice(start, start + math.prod(size) * dtype.itemsize)
            arrays[name] = self._staging[part].view(dtype).reshape(size)
            tensors[name] = self._buffer[part].view(TORCH_DTYPES[dtype]).view(size)
        rows, sampled = shape.rows, shape.num_sampled
        kv_lengths, table_rows, positions = (tensors[name] for name in ("kv_lengths", "table_rows", "positions"))
        generation = GenerationInputs(
            kv_lengths=kv_lengths[:rows], table_rows=table_rows[:rows], block_tables=self._tables,
            work={window: _generation_work(tensors, index) for index, window in enumerate(self._attention.windows)})
        contexts = ContextInputs(
            positions=positions[rows:], pool_slots=tensors["pool_slots"], query_starts=tensors["query_starts"],
            kv_lengths=kv_lengths[rows:], table_rows=table_rows[rows:], block_tables=self._tables,
            work={window: _context_work(tensors, index) for index, window in enumerate(self._attention.windows)}
            ) if shape.context_tokens else None
        read_back = self._results[: _num_results(shape)]
        step = StepTensors(
            slots=tensors["slots"], sampled_positions=kv_lengths, positions=positions,
            table_entries=tensors["table_entries"], table_blocks=tensors["table_blocks"], generation=generation,
            input_tokens=tensors.get("input_tokens", positions[:0]), logits_rows=tensors.get("logits_rows"),
            contexts=contexts, results=read_back[: 4 * sampled].view(4, sampled),
            context_sums=read_back[4 * sampled :].view(torch.float32), read_back=read_back)
        return arrays, step, num_bytes


def _generation_work(tensors: dict[str, torch.Tensor], index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the work list and the part starts of generation rows for the window with this index."""
    work_list, part_starts = tensors[f"work_{index}"], tensors[f"starts_{index}"]
    may_split = len(work_list) > len(part_starts) - 1
    return work_list, part_starts if may_split else None


def _context_work(tensors: dict[str, torch.Tensor], index: int
                  ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the work lists of context attention for the window with this index; see `ContextInputs.work`."""
    merged_rows = tensors[f"merged_rows_{index}"]
    may_split = len(merged_rows) > 0
    return (tensors[f"context_work_{index}"], tensors[f"context_starts_{index}"] if may_split else None,
            merged_rows if may_split else None)


def _num_results(shape: StepShape) -> int:
    return 4 * shape.num_sampled + shape.context_tokens


def _offsets(sections) -> tuple[dict[str, tuple[int, np.dtype, tuple[int, ...]]], int]:
    """Return name -> (first byte, dtype, shape) of each array in the buffer, and the total number of bytes."""
    offsets, start = {}, 0
    for name, (dtype, size) in sections.items():
        offsets[name] = start, np.dtype(dtype), size
        start += -(-math.prod(size) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, start
