"""Writes the arrays of a plain step, with padding, into the host memory that is sent to the device.

inputs.py defines plain steps.
"""

from typing import NamedTuple

import numpy as np
import torch

from ....attention.interface import BindableAttention
from ....triton_kernels.context_work_list import ContextTileWork
from ...block_tables import BlockTables
from ...device.running import Uploads
from ...packing import ContextRows, GenerationRows
from .inputs import StepInputs
from .shapes import StepShape


class StepWork(NamedTuple):
    """The work of attention in a plain step. The docstring of inputs.py defines plain steps.

    Each field has one entry for each attention window that the layers use.

    generation   (work list, part starts) of `BindableAttention.plan_generation`
    contexts     results of `BindableAttention.plan_contexts`; empty if the step has no contexts
    """

    generation: list[tuple[np.ndarray, np.ndarray]]
    contexts: list[ContextTileWork]

    @property
    def is_split(self) -> bool:
        """Whether any keys are split into parts, so that partial results must be merged."""
        return (any(part_starts[-1] for _, part_starts in self.generation)
                or any(len(work.merged_rows) for work in self.contexts))


class StepWriter:
    """Writes the arrays of plain steps. inputs.py defines plain steps and their arrays.

    block_tables   the copy on the device of the host's block tables, with a last row that belongs to no sequence
    tables         the host's block tables
    padding_slot   a slot that no sequence has
    """

    def __init__(self, inputs: StepInputs, attention: BindableAttention, block_tables: torch.Tensor,
                 tables: BlockTables, uploads: Uploads, *, padding_slot: int) -> None:
        self._inputs, self._attention, self._block_tables, self._tables = inputs, attention, block_tables, tables
        self._uploads, self._padding_slot = uploads, padding_slot
        self._spare_entry = block_tables.numel() - 1

    def plan(self, generation: GenerationRows, contexts: ContextRows | None, num_rows: int) -> StepWork:
        """Return the work of attention, with the generation rows padded to `num_rows` rows.

        contexts   None: the step has no contexts
        """
        planned = self._attention.plan_generation(_padded(generation.kv_lengths, num_rows))
        chunks = {}
        if contexts is not None:
            chunks = self._attention.plan_contexts(np.diff(contexts.step.query_starts), contexts.step.kv_lengths)
        return StepWork(list(planned.values()), list(chunks.values()))

    def write(self, shape: StepShape, work: StepWork, generation: GenerationRows, contexts: ContextRows | None) -> None:
        """Write all arrays of a step of `shape`.

        Block table changes that these arrays cannot hold are uploaded separately.

        work       the result of `plan` for the same rows and contexts; it is split only if `shape.is_split` is true
        contexts   None: the step has no contexts, and neither has `shape`
        """
        arrays, rows = self._inputs.arrays(shape), shape.rows
        entries, blocks = self._tables.changes()
        room = len(arrays["table_entries"])
        if len(entries) > room:                         # new prompts bring many blocks
            self._block_tables.view(-1).index_copy_(0, *self._uploads.send([entries[room:], blocks[room:]]))
        _fill(arrays["table_entries"], entries[:room], self._spare_entry)
        _fill(arrays["table_blocks"], blocks[:room], 0)
        for index, (work_list, part_starts) in enumerate(work.generation):
            _fill(arrays[f"work_{index}"], work_list, -1)
            arrays[f"starts_{index}"][:] = part_starts
        for name, values, padding in (
                ("slots", generation.slots, self._padding_slot), ("positions", generation.positions, 0),
                ("kv_lengths", generation.kv_lengths, 0), ("table_rows", generation.table_rows, 0)):
            _fill(arrays[name][:rows], values, padding)
        if contexts is not None:
            self._write_contexts(shape, work.contexts, arrays, contexts)

    def _write_contexts(self, shape: StepShape, work: list[ContextTileWork], arrays: dict[str, np.ndarray],
                        contexts: ContextRows) -> None:
        rows, step = shape.rows, contexts.step
        slots = np.where(contexts.is_last_chunk, step.slots, self._padding_slot)
        ends = step.query_starts[1:]
        for name, values, padding in (
                ("slots", slots, self._padding_slot), ("positions", step.positions, 0),
                ("kv_lengths", step.kv_lengths, 0), ("table_rows", contexts.table_rows, 0),
                ("logits_rows", rows + ends - 1, 0)):
            _fill(arrays[name][rows:], values, padding)
        arrays["logits_rows"][:rows] = np.arange(rows)
        arrays["query_starts"][0] = 0
        _fill(arrays["query_starts"][1:], ends, step.num_tokens)       # padding sequences have no tokens
        for name, values, padding in (("input_tokens", step.token_ids, 0), ("pool_slots", step.pool_slots, -1)):
            _fill(arrays[name], values, padding)
        for index, tiles in enumerate(work):
            _fill(arrays[f"context_work_{index}"], tiles.work_list, -1)
            _fill(arrays[f"context_starts_{index}"], tiles.part_starts, tiles.part_starts[-1])   # padding has no parts
            _fill(arrays[f"merged_rows_{index}"], tiles.merged_rows, 0)


def _fill(array: np.ndarray, values: np.ndarray, padding: int) -> None:
    array[: len(values)], array[len(values) :] = values, padding


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    array = np.empty(count, np.int32)
    _fill(array, values, 0)
    return array
