"""Inputs and results of steps at fixed addresses: device memory whose addresses depend on the padded shape only.

Such a step has sequences that generate one token each, or compute a chunk of their prompt, and temperature, top-k,
top-p and min-p alone determine the sampled tokens. The form `fixed` launches it, and the form `graph` replays it.

Computed on the host, without waiting for the device:
    the arrays of SECTIONS and WORK_SECTIONS
On the device, at a fixed address while the engine lives:
    the block tables; sampling parameters and newest tokens of each slot (`decoding/slots.py`); the KV cache pool
In each step:
    one copy of all arrays to one buffer on the device, from a ring of pinned memory (`Uploads`); one copy of all
    results to the host

The arrays follow one another at offsets that the `Shape` determines. Generation rows come first, then contexts, each
with its padding, so that both start at rows that the shape determines. A padding row has a slot that no sequence uses
and length 0, and its token is not stored. All steps of a shape therefore make the same launches with the same
arguments, and a graph of these launches can be replayed.

A new array is a field of the rows that packing.py makes, and a line of SECTIONS. Launches find it by its name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from ....attention.interface import Attention, ContextInputs, GenerationInputs
from ....handover import ScheduledBatch
from ....triton_kernels.context_work_list import WORK_COLUMNS
from ...adapters.pool import ROWS as TILE_ROWS
from ...device.running import ALIGNMENT
from ...packing import (
    NO_CONTEXT_ROWS,
    NO_GENERATION_ROWS,
    ContextRows,
    GenerationRows,
    locate_contexts,
    locate_generation,
)
from ...parts import DeviceParts
from ..form import LENGTH, SLOTS
from .shapes import MOST_CONTEXTS, Shape

SPARE_CHANGES = 32                 # block table entries that a step can change beyond those for its own tokens
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
UNUSED_SLOT, UNUSED_ENTRY, UNUSED_PAGE, LAST_VALUE = (               # kinds of padding
    "unused slot", "unused entry", "unused page", "last value")


def can_bind(attention: Attention) -> bool:
    """Whether an attention can read its inputs at fixed addresses; see BindableAttention."""
    return getattr(attention, "can_bind", False) is True


class Section(NamedTuple):
    """An input array of a step.

    of        what has an entry in the array, in order. `FixedInputs._counts` has the number of each kind
    padding   value of the entries that no value is given for; LAST_VALUE: the last value that is given
    columns   number of columns, if the array has two dimensions
    """

    name: str
    dtype: type[np.signedinteger]
    of: tuple[str, ...]
    padding: int | str
    columns: tuple[int, ...] = ()


# The values of each "row" are a field of GenerationRows, and those of contexts and their tokens a field of ContextRows.
SECTIONS = (
    Section("slots", np.int64, ("row", "context"), UNUSED_SLOT),
    Section("positions", np.int64, ("row", "token"), 0),
    Section("kv_lengths", np.int32, ("row", "context"), 0),
    Section("table_rows", np.int32, ("row", "context"), 0),
    Section("token_ids", np.int64, ("token",), 0),
    Section("pool_slots", np.int64, ("token",), -1),
    Section("query_starts", np.int32, ("context + 1",), LAST_VALUE),           # padding sequences have no tokens
    # Rows of hidden states to sample from; without contexts these are all rows.
    Section("logits_rows", np.int64, ("row beside contexts", "context"), 0),
    # Indices of the changed entries in the flattened block tables, and their blocks: BlockTables.changes.
    Section("table_entries", np.int64, ("change",), UNUSED_ENTRY),
    Section("table_blocks", np.int32, ("change",), 0),
    # Tiles of the rows with an adapter: first row, end, first page of the adapter. Padding has no rows and no ranks.
    Section("adapter_tiles", np.int32, ("adapter tile",), UNUSED_PAGE, (3,)),
)
# For each window of the layers: the results of `plan_generation` and `plan_contexts` of BindableAttention.
WORK_SECTIONS = (
    Section("work", np.int32, ("part",), -1, (4,)),
    Section("starts", np.int32, ("row + 1",), LAST_VALUE),
    Section("context_work", np.int32, ("context part",), -1, (WORK_COLUMNS,)),
    Section("context_starts", np.int32, ("split token + 1",), LAST_VALUE),     # padding has no parts
    Section("merged_rows", np.int32, ("split token",), 0),
)
GIVEN_BY = {"row": "rows", "context": "contexts", "token": "contexts", "context + 1": "contexts",
            "row beside contexts": "rows beside contexts", "change": "changes", "part": "work", "row + 1": "work",
            "context part": "context work", "split token + 1": "context work", "split token": "context work",
            "adapter tile": "adapters"}

NO_TILES = np.empty((0, 3), np.int32)
Targets = list[tuple[np.ndarray, int | None]]          # (array to fill, value of its padding; None: the last value)


@dataclass(frozen=True, slots=True)
class Division:
    """How the buffers are divided into the arrays of a step of one shape.

    The step has R generation rows, and T context tokens of C contexts.

    arrays         name -> host array of a section. Those of WORK_SECTIONS end in "_" and the index of the window
    tensors        name -> the array on the device
    num_bytes      number of bytes of all arrays
    targets        a value of GIVEN_BY -> what it fills, in the order of the sections; for each window a list of its own
    generation     see GenerationInputs
    contexts       see ContextInputs; None if T is 0
    results        [4, R + C] int32   tokens, finish reasons, whether logits are finite, bits of the log-probs
    context_sums   [T] float32   sum of each context token's hidden state; not finite if any of its values is not
    read_back      [4 * (R + C) + T] int32   results, then the bits of the sums
    """

    arrays: Mapping[str, np.ndarray]
    tensors: Mapping[str, torch.Tensor]
    num_bytes: int
    targets: Mapping[str, Targets]
    work_targets: Sequence[Mapping[str, Targets]]
    generation: GenerationInputs
    contexts: ContextInputs | None
    results: torch.Tensor
    context_sums: torch.Tensor
    read_back: torch.Tensor


class FixedInputs:
    """The input buffer and the result buffer of all steps on the device, and the block tables on the device.

    parts     with a BindableAttention, block tables that note their changes for a copy, and num_slots + 1 slots
    largest   the shapes that need the largest buffers

    block_tables   [rows + 1, max_blocks] int32 on the device; the last row belongs to no sequence

    Padding rows use slot `parts.num_slots`, and slots from this one on have no row in the block tables on the device.
    Once a sequence was set up in such a slot, no batch fits any more.
    """

    def __init__(self, parts: DeviceParts, largest: Sequence[Shape]) -> None:
        self._attention, self._tables, self._uploads = parts.attention, parts.tables, parts.uploads
        self._slots, self._num_slots, self._tokens_per_block = parts.slots, parts.num_slots, parts.tokens_per_block
        self._port = port = parts.adapters
        num_rows, max_blocks = parts.tables.copied
        self._max_tokens, device = max_blocks * parts.tokens_per_block, parts.device
        self.block_tables = torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self._paddings = {UNUSED_SLOT: parts.num_slots, UNUSED_ENTRY: num_rows * max_blocks, LAST_VALUE: None,
                          UNUSED_PAGE: 0 if port is None else port.unused_tile}
        self._values_of_rows = _values("rows")
        self._values_of_contexts = _values("contexts")
        num_bytes = max(_offsets(self._sections(), self._counts(shape))[1] for shape in largest)
        self._staging = np.zeros(num_bytes, np.uint8)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._results = torch.zeros(max(map(_num_results, largest)), dtype=torch.int32, device=device)
        self._divisions: dict[Shape, Division] = {}

    def of(self, shape: Shape) -> Division:
        """Return the arrays of steps of `shape`. They stay at the same addresses."""
        found = self._divisions.get(shape)
        if found is None:
            found = self._divisions[shape] = self._divide(shape)
        return found

    def oversize(self, batch: ScheduledBatch) -> int:
        """Return SLOTS or LENGTH if the slots or the blocks of a batch do not fit; 0: they do."""
        if self._slots.num_taken > self._num_slots:
            return SLOTS
        kv_lengths, most = batch.generation.kv_lengths, self._max_tokens
        if len(kv_lengths) and kv_lengths.max() >= most or batch.context and any(
                work.start + len(work.token_ids) > most for work in batch.context):
            return LENGTH
        return 0

    def may_split(self, rows: int, context_tokens: int = 0) -> bool:
        """Whether attention may split keys into parts in a step of `rows` generation rows and `context_tokens`."""
        max_blocks = self.block_tables.shape[1]
        return (self._attention.most_parts(rows, max_blocks) > rows
                or self._attention.most_context_work(context_tokens, MOST_CONTEXTS, max_blocks, True).split > 0)

    def write(self, batch: ScheduledBatch, shape: Shape) -> Shape:
        """Write the arrays of a batch, padded to `shape`, to the host memory from which `send` sends them.

        Return the shape, which is split if attention splits keys into parts; `is_split` of the argument is False.
        """
        generation, contexts = NO_GENERATION_ROWS, None
        if len(batch.generation):
            generation = locate_generation(batch, self._tables, self._tokens_per_block)
        tiles = NO_TILES
        if shape.adapts:
            tiles = self._tiles(batch, generation, shape.rows)
        if batch.context:
            contexts = locate_contexts(batch, self._tables, self._tokens_per_block, unused_slot=self._num_slots,
                                       num_rows_before=shape.rows)
        return self._write(shape, generation, contexts, tiles)

    def _tiles(self, batch: ScheduledBatch, generation: GenerationRows, num_rows: int) -> np.ndarray:
        """Return the tiles of the rows with an adapter. Contexts begin at row `num_rows`."""
        segments = self._port.segments_of(generation.slots, np.arange(len(generation.slots) + 1))
        if batch.context:
            lengths = [len(work.token_ids) for work in batch.context]
            segments += self._port.segments_of(np.array([work.slot for work in batch.context], np.int32),
                                               np.cumsum([0, *lengths]), num_rows)
        return self._port.tiles_of(segments)

    def write_padding(self, shape: Shape) -> None:
        """Write the arrays of a step of which all is padding."""
        self._write(shape, NO_GENERATION_ROWS, NO_CONTEXT_ROWS if shape.contexts else None)

    def send(self, shape: Shape) -> None:
        """Start copying the arrays of `shape` to the device, in one copy. Does not wait for the copy."""
        num_bytes = self.of(shape).num_bytes
        self._uploads.into(self._buffer[:num_bytes], self._staging[:num_bytes])

    def are_sent(self) -> None:
        """Forget the changes of the block tables. Call after a launch that read the arrays which `send` copies."""
        self._tables.forget_changes()

    def _write(self, shape: Shape, generation: GenerationRows, contexts: ContextRows | None,
               adapter_tiles: np.ndarray = NO_TILES) -> Shape:
        lengths = generation.kv_lengths
        if len(lengths) < shape.rows:
            lengths = np.zeros(shape.rows, np.int32)
            lengths[: len(generation.kv_lengths)] = generation.kv_lengths
        work = self._attention.plan_generation(lengths).values()
        is_split, tiles = any(part_starts[-1] for _, part_starts in work), ()
        if contexts is not None:
            tiles = self._attention.plan_contexts(np.diff(contexts.query_starts), contexts.kv_lengths).values()
            is_split = is_split or any(len(one.merged_rows) for one in tiles)
        if is_split and not shape.is_split:
            shape = shape._replace(is_split=True)
        division = self.of(shape)
        targets = division.targets

        entries, blocks = self._tables.changes()
        room = len(division.arrays["table_entries"])
        if len(entries) > room:                         # new prompts bring many blocks
            self.block_tables.view(-1).index_copy_(0, *self._uploads.send([entries[room:], blocks[room:]]))
        _fill(targets["changes"], (entries[:room], blocks[:room]))
        _fill(targets["rows"], self._values_of_rows(generation))
        if shape.adapts:
            _fill(targets["adapters"], (adapter_tiles,))
        for windows, values in zip(division.work_targets, work):
            _fill(windows["work"], values)
        if contexts is not None:
            _fill(targets["rows beside contexts"], (np.arange(shape.rows),))
            _fill(targets["contexts"], self._values_of_contexts(contexts))
            for windows, values in zip(division.work_targets, tiles):
                _fill(windows["context work"], values)
        return shape

    def _sections(self) -> list[Section]:
        return [*SECTIONS, *(section._replace(name=f"{section.name}_{index}")
                             for index in range(len(self._attention.windows)) for section in WORK_SECTIONS)]

    def _counts(self, shape: Shape) -> dict[str, int]:
        """Return the number of entries of each kind that a section has entries of."""
        rows, tokens, contexts = shape.rows, shape.context_tokens, shape.contexts
        max_blocks = self.block_tables.shape[1]
        counts = dict.fromkeys(GIVEN_BY, 0) | {
            "row": rows, "row + 1": rows + 1, "context": contexts, "token": tokens,
            "change": shape.num_sampled + tokens // self._tokens_per_block + SPARE_CHANGES,
            "part": self._attention.most_parts(rows, max_blocks) if shape.is_split else rows,
            # Each sequence may have an adapter of its own, and a tile that is not full.
            "adapter tile": shape.num_sampled + tokens // TILE_ROWS if shape.adapts else 0}
        if contexts:
            most = self._attention.most_context_work(tokens, contexts, max_blocks, shape.is_split)
            counts |= {"context + 1": contexts + 1, "row beside contexts": rows, "context part": most.rows,
                       "split token": most.split, "split token + 1": most.split + 1}
        return counts

    def _divide(self, shape: Shape) -> Division:
        sections, counts = self._sections(), self._counts(shape)
        offsets, num_bytes = _offsets(sections, counts)
        assert num_bytes <= len(self._staging) and _num_results(shape) <= len(self._results), (
            f"{shape} is larger than the largest shape")
        arrays, tensors = {}, {}
        targets = [{source: [] for source in GIVEN_BY.values()} for _ in range(1 + len(self._attention.windows))]
        for number, (section, start) in enumerate(zip(sections, offsets)):
            size = sum(counts[kind] for kind in section.of), *section.columns
            dtype = np.dtype(section.dtype)
            part = slice(start, start + math.prod(size) * dtype.itemsize)
            array = arrays[section.name] = self._staging[part].view(dtype).reshape(size)
            tensors[section.name] = self._buffer[part].view(TORCH_DTYPES[dtype]).view(size)
            window, stop = max(0, number - len(SECTIONS)) // len(WORK_SECTIONS) + (number >= len(SECTIONS)), 0
            for kind in section.of:
                first, stop = stop, stop + counts[kind]
                targets[window][GIVEN_BY[kind]].append(
                    (array[first:stop], self._paddings.get(section.padding, section.padding)))
        rows, sampled, windows = shape.rows, shape.num_sampled, self._attention.windows
        kv_lengths, table_rows = tensors["kv_lengths"], tensors["table_rows"]
        generation = GenerationInputs(
            kv_lengths=kv_lengths[:rows], table_rows=table_rows[:rows], block_tables=self.block_tables,
            work={window: _generation_work(tensors, index) for index, window in enumerate(windows)})
        contexts = ContextInputs(
            positions=tensors["positions"][rows:], pool_slots=tensors["pool_slots"],
            query_starts=tensors["query_starts"], kv_lengths=kv_lengths[rows:], table_rows=table_rows[rows:],
            block_tables=self.block_tables,
            work={window: _context_work(tensors, index) for index, window in enumerate(windows)}
            ) if shape.contexts else None
        read_back = self._results[: _num_results(shape)]
        return Division(arrays, tensors, num_bytes, targets[0], targets[1:], generation, contexts,
                        results=read_back[: 4 * sampled].view(4, sampled),
                        context_sums=read_back[4 * sampled :].view(torch.float32), read_back=read_back)


def _values(source: str) -> attrgetter:
    """Return a function that takes rows of packing.py and returns those of their fields that are in SECTIONS."""
    return attrgetter(*[section.name for section in SECTIONS for kind in section.of if GIVEN_BY[kind] == source])


def _fill(targets: Targets, given: Iterable[np.ndarray]) -> None:
    for (array, padding), values in zip(targets, given):
        count = len(values)
        array[:count] = values
        if count < len(array):
            array[count:] = values[-1] if padding is None else padding


def _generation_work(tensors: Mapping[str, torch.Tensor], index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the work list and the part starts of generation rows for the window with this index."""
    work_list, part_starts = tensors[f"work_{index}"], tensors[f"starts_{index}"]
    may_split = len(work_list) > len(part_starts) - 1
    return work_list, part_starts if may_split else None


def _context_work(tensors: Mapping[str, torch.Tensor], index: int
                  ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the work lists of context attention for the window with this index; see `ContextInputs.work`."""
    merged_rows = tensors[f"merged_rows_{index}"]
    may_split = len(merged_rows) > 0
    return (tensors[f"context_work_{index}"], tensors[f"context_starts_{index}"] if may_split else None,
            merged_rows if may_split else None)


def _num_results(shape: Shape) -> int:
    return 4 * shape.num_sampled + shape.context_tokens


def _offsets(sections: Sequence[Section], counts: Mapping[str, int]) -> tuple[list[int], int]:
    """Return the first byte of each section in the buffer, and the total number of bytes."""
    offsets, start = [], 0
    for section in sections:
        offsets.append(start)
        num_bytes = sum(counts[kind] for kind in section.of) * math.prod(section.columns) * section.dtype().itemsize
        start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, start
