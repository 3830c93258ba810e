"""Writes the arrays of a plain step, with padding, into the host memory that is sent to the device.

step_inputs.py defines plain steps.
"""

import numpy as np

from ..attention.interface import BindableAttention
from .block_tables import BlockTables
from .device import Uploads
from .graph_shapes import StepShape
from .packing import ContextRows, GenerationRows
from .resident_tables import ResidentTables
from .step_inputs import StepInputs

Work = list[tuple[np.ndarray, np.ndarray]]         # one for each window, see BindableAttention.plan_generation


class StepWriter:
    """Writes the arrays of plain steps, which step_inputs.py defines.

    tables         the host's block tables
    resident       the copy of these tables on the device
    padding_slot   a slot that no sequence has
    """

    def __init__(self, inputs: StepInputs, attention: BindableAttention, resident: ResidentTables, tables: BlockTables,
                 uploads: Uploads, *, padding_slot: int) -> None:
        self._inputs, self._attention, self._resident, self._tables = inputs, attention, resident, tables
        self._uploads, self._padding_slot = uploads, padding_slot

    def plan(self, generation: GenerationRows, num_rows: int) -> Work:
        """Return (work list, part starts) of the attention kernel for each window.

        The generation rows are padded to `num_rows` rows.
        """
        return list(self._attention.plan_generation(_padded(generation.kv_lengths, num_rows)).values())

    def write(self, shape: StepShape, work: Work, generation: GenerationRows, contexts: ContextRows | None) -> None:
        """Write all arrays of a step of `shape`.

        Block table changes that these arrays cannot hold are uploaded separately.
        """
        arrays, rows = self._inputs.arrays(shape), shape.rows
        entries, blocks = self._resident.changes(self._tables)
        room = len(arrays["table_entries"])
        if len(entries) > room:                         # new prompts bring many blocks
            self._resident.tensor.view(-1).index_copy_(0, *self._uploads.send([entries[room:], blocks[room:]]))
        _fill(arrays["table_entries"], entries[:room], self._resident.spare_entry)
        _fill(arrays["table_blocks"], blocks[:room], 0)
        for index, (work_list, part_starts) in enumerate(work):
            _fill(arrays[f"work_{index}"], work_list, -1)
            arrays[f"starts_{index}"][:] = part_starts
        for name, values, padding in (
                ("slots", generation.slots, self._padding_slot), ("positions", generation.positions, 0),
                ("kv_lengths", generation.kv_lengths, 0), ("table_rows", generation.table_rows, 0)):
            _fill(arrays[name][:rows], values, padding)
        if shape.context_tokens:
            self._write_contexts(shape, arrays, contexts)

    def _write_contexts(self, shape: StepShape, arrays: dict[str, np.ndarray], contexts: ContextRows | None) -> None:
        rows, none = shape.rows, np.empty(0, np.int32)
        slots = table_rows = kv_lengths = positions = token_ids = pool_slots = ends = none
        lengths = none
        if contexts is not None:
            step, table_rows = contexts.step, contexts.table_rows
            kv_lengths, positions, token_ids, pool_slots = (
                step.kv_lengths, step.positions, step.token_ids, step.pool_slots)
            slots = np.where(contexts.is_last_chunk, step.slots, self._padding_slot)
            ends, lengths = step.query_starts[1:], np.diff(step.query_starts)
        for name, values, padding in (
                ("slots", slots, self._padding_slot), ("positions", positions, 0), ("kv_lengths", kv_lengths, 0),
                ("table_rows", table_rows, 0), ("logits_rows", rows + ends - 1, 0)):
            _fill(arrays[name][rows:], values, padding)
        arrays["logits_rows"][:rows] = np.arange(rows)
        arrays["query_starts"][0] = 0
        _fill(arrays["query_starts"][1:], ends, len(token_ids))        # padding sequences have no tokens
        for name, values, padding in (("input_tokens", token_ids, 0), ("pool_slots", pool_slots, -1)):
            _fill(arrays[name], values, padding)
        for index, work in enumerate(self._attention.plan_contexts(lengths, kv_lengths).values()):
            _fill(arrays[f"context_work_{index}"], work.work_list, -1)
            _fill(arrays[f"context_starts_{index}"], work.part_starts, work.part_starts[-1])     # padding has no parts
            _fill(arrays[f"merged_rows_{index}"], work.merged_rows, 0)


def _fill(array: np.ndarray, values: np.ndarray, padding: int) -> None:
    array[: len(values)], array[len(values) :] = values, padding


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    array = np.empty(count, np.int32)
    _fill(array, values, 0)
    return array
