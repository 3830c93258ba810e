from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.device.running import ALIGNMENT, Uploads
from batch_manager.runtime.forms.fixed import inputs as inputs_module
from batch_manager.runtime.forms.fixed.inputs import LAST_VALUE, SECTIONS, WORK_SECTIONS, FixedInputs, Section
from batch_manager.runtime.forms.fixed.shapes import Shape
from batch_manager.runtime.packing import NO_GENERATION_ROWS
from batch_manager.triton_kernels.context_work_list import ContextTileWork, MostContextTileWork

CPU, SLOTS, BLOCKS, SIZE, MOST_ROWS, MOST_TOKENS, MOST_CONTEXTS = torch.device("cpu"), 5, 6, 8, 24, 80, 5
OLD = 77                                                  # each byte of the arrays before a step
LARGEST = [Shape(MOST_ROWS, True, True), Shape(MOST_ROWS, True, True, MOST_TOKENS, MOST_CONTEXTS)]
SHAPES = st.one_of(
    st.tuples(st.integers(SLOTS, MOST_ROWS), st.just(False), st.booleans()),
    st.tuples(st.integers(SLOTS, MOST_ROWS), st.just(False), st.just(True), st.integers(40, MOST_TOKENS),
              st.integers(3, MOST_CONTEXTS))).map(lambda numbers: Shape(*numbers))


class Attention:
    """An attention of two windows that splits keys of sequences of more than 30 tokens."""

    windows = (None, 100)

    def plan_generation(self, kv_lengths):
        rows, is_split = np.arange(len(kv_lengths), dtype=np.int32), kv_lengths > 30
        work = np.stack([rows, kv_lengths, is_split, rows], 1)
        starts = np.concatenate([[0], is_split.cumsum()]).astype(np.int32)
        return {None: (work, starts), 100: (np.concatenate([work, work[is_split] + 1]), starts)}

    def plan_contexts(self, query_lengths, kv_lengths):
        split = np.flatnonzero(kv_lengths > 30).astype(np.int32)
        work = np.stack([query_lengths, kv_lengths, *np.ones((3, len(kv_lengths)))], 1).astype(np.int32)
        tiles = ContextTileWork(work, np.arange(len(split) + 1, dtype=np.int32) * 2, split)
        return {None: tiles, 100: tiles}

    def most_parts(self, num_rows, max_blocks):
        return 2 * num_rows

    def most_context_work(self, num_tokens, num_contexts, max_blocks, may_split):
        return MostContextTileWork(num_contexts, num_contexts if may_split else 0)


def make(largest=LARGEST, tables=None):
    tables = tables or BlockTables(SLOTS, BLOCKS, copied=(SLOTS, BLOCKS))
    parts = SimpleNamespace(attention=Attention(), tables=tables, uploads=Uploads(CPU), device=CPU, num_slots=SLOTS,
                            tokens_per_block=SIZE, slots=SimpleNamespace(num_taken=0), adapters=None)
    return FixedInputs(parts, largest)


def random_batch(draw, has_contexts):
    """Return a batch with the work of up to SLOTS sequences, of which up to three are contexts of up to 13 tokens."""
    slots = draw.permutation(SLOTS)[: draw.integers(1, SLOTS + 1)].astype(np.int32)
    num_contexts = min(draw.integers(1, 4), len(slots)) if has_contexts else 0
    contexts = tuple(ContextWork(int(slot), draw.integers(0, 99, draw.integers(1, 14)).astype(np.int32),
                                 int(draw.integers(30)), bool(draw.integers(2))) for slot in slots[:num_contexts])
    rows, indices = np.divmod(np.arange(SLOTS * BLOCKS, dtype=np.int32), np.int32(BLOCKS))
    lengths = draw.integers(1, BLOCKS * SIZE, len(slots) - num_contexts).astype(np.int32)
    return ScheduledBatch(0, context=contexts, generation=GenerationWork(slots[num_contexts:], lengths),
                          block_table_updates=BlockTableUpdates(rows, indices, draw.permutation(99)[:len(rows)].astype(
                              np.int32)))


def expected_of(batch, shape, tables, padding_slot=SLOTS):
    """Return name -> the values that an array of the step must have, with padding."""
    generation, contexts = batch.generation, batch.context
    lengths, unused = generation.kv_lengths, shape.rows - len(generation)
    more = shape.contexts - len(contexts)
    tokens = [token for work in contexts for token in work.token_ids.tolist()]
    positions = [work.start + index for work in contexts for index in range(len(work.token_ids))]
    table_rows = np.repeat([work.slot for work in contexts], [len(work.token_ids) for work in contexts]).astype(int)
    pool_slots = [int(tables.rows[row, position // SIZE]) * SIZE + position % SIZE
                  for row, position in zip(table_rows, positions)]
    ends = np.cumsum([len(work.token_ids) for work in contexts], dtype=int).tolist()
    spare = shape.context_tokens - len(tokens)
    expected = {
        "slots": [*generation.slots, *[padding_slot] * unused,
                  *(work.slot if work.is_last_chunk else padding_slot for work in contexts), *[padding_slot] * more],
        "positions": [*lengths, *[0] * unused, *positions, *[0] * spare],
        "kv_lengths": [*(lengths + 1), *[0] * unused, *(work.start + len(work.token_ids) for work in contexts),
                       *[0] * more],
        "table_rows": [*generation.slots, *[0] * unused, *(work.slot for work in contexts), *[0] * more],
        "token_ids": [*tokens, *[0] * spare], "pool_slots": [*pool_slots, *[-1] * spare],
        "query_starts": [], "logits_rows": []}
    if contexts:
        expected["query_starts"] = [0, *ends, *[len(tokens)] * more]
        expected["logits_rows"] = [*range(shape.rows), *(shape.rows + end - 1 for end in ends), *[0] * more]
    return expected


def tensors_of(division, rows):
    """Return name -> the tensor that attention or the launches read, for every array of SECTIONS."""
    given, contexts = division.generation, division.contexts
    found = dict(division.tensors)
    assert given.kv_lengths.tolist() == found["kv_lengths"][:rows].tolist()
    assert given.table_rows.tolist() == found["table_rows"][:rows].tolist()
    if contexts is not None:
        assert contexts.positions.tolist() == found["positions"][rows:].tolist()
        assert contexts.kv_lengths.tolist() == found["kv_lengths"][rows:].tolist()
        assert contexts.table_rows.tolist() == found["table_rows"][rows:].tolist()
        assert contexts.pool_slots is found["pool_slots"] and contexts.query_starts is found["query_starts"]
    return {name: tensor.tolist() for name, tensor in found.items()}


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_batch_arrives_with_its_padding_at_addresses_that_the_shape_gives(shapes, seed):
    tables = BlockTables(SLOTS, BLOCKS, copied=(SLOTS, BLOCKS))
    inputs, draw = make(tables=tables), np.random.default_rng(seed)
    known, sent = {}, np.zeros((SLOTS, BLOCKS), np.int32)
    for shape in shapes:
        batch = random_batch(draw, shape.contexts > 0)
        tables.update(batch)
        inputs._staging[...] = OLD
        written = inputs.write(batch, shape)
        lengths = [*(work.start + len(work.token_ids) for work in batch.context), *(batch.generation.kv_lengths + 1)]
        assert written == shape._replace(is_split=max(lengths) > 30)
        assert not any(np.isin(array, [OLD * 0x01010101, OLD * 0x0101010101010101]).any()
                       for array in inputs.of(written).arrays.values()), "an entry was not written"
        inputs.send(written)
        inputs._staging[...] = 0                          # later writes must not change the sent arrays
        division = inputs.of(written)
        found = tensors_of(division, shape.rows)
        expected = expected_of(batch, written, tables)
        assert {name: found[name] for name in expected} == expected
        for entry, block in zip(found["table_entries"], found["table_blocks"]):
            if entry < sent.size:
                sent.flat[entry] = block
        assert np.array_equal(sent, tables.rows) and set(found["table_entries"][SLOTS * BLOCKS :]) <= {SLOTS * BLOCKS}
        inputs.are_sent()
        assert set(found) == {section.name for section in inputs._sections()}
        planned = Attention().plan_generation(np.array([*expected["kv_lengths"][: shape.rows]], np.int32))
        for index, window in enumerate(Attention.windows):
            work, starts = division.generation.work[window]
            work_list, part_starts = planned[window]
            assert work[: len(work_list)].tolist() == work_list.tolist() and (work[len(work_list):] == -1).all()
            assert found[f"starts_{index}"] == part_starts.tolist() and (starts is not None) == written.is_split
            if division.contexts is not None:
                tiles = Attention().plan_contexts(
                    np.diff(found["query_starts"])[: len(batch.context)],
                    np.array(found["kv_lengths"][shape.rows :][: len(batch.context)]))[window]
                work, starts, merged_rows = division.contexts.work[window]
                count, split = len(batch.context), len(tiles.merged_rows)
                assert work[:count].tolist() == tiles.work_list.tolist() and (work[count:] == -1).all()
                assert (starts is not None) == (merged_rows is not None) == written.is_split
                if written.is_split:
                    assert starts.tolist() == [*tiles.part_starts, *[2 * split] * (shape.contexts - split)]
                    assert merged_rows.tolist() == [*tiles.merged_rows, *[0] * (shape.contexts - split)]
        assert division.results.shape == (4, shape.num_sampled) and division.results.is_contiguous()
        assert len(division.context_sums) == shape.context_tokens
        assert division.read_back.data_ptr() == division.results.data_ptr()
        assert len(division.read_back) == division.results.numel() + len(division.context_sums)
        addresses = [tensor.data_ptr() for tensor in (*division.tensors.values(), division.results)]
        assert all((address - inputs._buffer.data_ptr()) % ALIGNMENT == 0 for address in addresses[:-1] if address)
        assert known.setdefault(written, addresses) == addresses


def test_what_does_not_fit_into_the_array_of_changes_is_uploaded_by_itself():
    tables = BlockTables(SLOTS, 100, copied=(SLOTS, 100))
    inputs = make(tables=tables)
    rows, indices = np.divmod(np.arange(500, dtype=np.int32), np.int32(100))
    tables.update(ScheduledBatch(0, block_table_updates=BlockTableUpdates(rows, indices, 7 + np.arange(
        500, dtype=np.int32))))
    shape = inputs.write(ScheduledBatch(0, generation=GenerationWork(*np.array([[0], [3]], np.int32))), Shape(
        SLOTS, False, False))
    entries = inputs.of(shape).arrays["table_entries"]
    assert entries.tolist() == list(range(SLOTS + inputs_module.SPARE_CHANGES))
    assert inputs.block_tables.view(-1)[len(entries) : 500].tolist() == list(range(7 + len(entries), 507))


def test_a_new_array_is_a_line_of_the_table_and_a_field_of_the_packed_rows():
    """Then it is divided, filled, padded and sent: the files of a new array are packing.py and this table's."""
    mine = (*SECTIONS, Section("adapter", np.int32, ("row", "context"), 7))

    class Rows:
        def __init__(self, rows, adapter):
            self.adapter, self._rows = np.array(adapter, np.int32), rows

        def __getattr__(self, name):
            return getattr(self._rows, name)

    with mock.patch.object(inputs_module, "SECTIONS", mine), mock.patch.object(
            inputs_module, "locate_generation", lambda *given, locate=inputs_module.locate_generation: Rows(
                locate(*given), [1, 2])):
        tables = BlockTables(SLOTS, BLOCKS, copied=(SLOTS, BLOCKS))
        tables.update(ScheduledBatch(0, block_table_updates=BlockTableUpdates(*np.array([[0, 1], [0, 0], [3, 4]],
                                                                                        np.int32))))
        inputs = make(tables=tables)
        shape = inputs.write(ScheduledBatch(0, generation=GenerationWork(*np.array([[0, 1], [2, 3]], np.int32))), Shape(
            4, False, False))
        inputs.send(shape)
        assert inputs.of(shape).tensors["adapter"].tolist() == [1, 2, 7, 7]


def test_every_array_says_its_padding_and_every_field_of_packed_rows_is_known():
    for section in (*SECTIONS, *WORK_SECTIONS):
        assert isinstance(section.padding, int) or section.padding in (
            inputs_module.UNUSED_SLOT, inputs_module.UNUSED_ENTRY, inputs_module.UNUSED_PAGE, LAST_VALUE), section
        assert set(section.of) <= inputs_module.GIVEN_BY.keys()
    names = {section.name for section in SECTIONS if "row" in section.of}
    assert names | {"blocks", "max_blocks"} == set(NO_GENERATION_ROWS._fields)


@pytest.mark.parametrize("largest, shape", [
    (LARGEST[:1], Shape(MOST_ROWS + 1, True, True)),
    (LARGEST, Shape(MOST_ROWS, True, True, MOST_TOKENS + 20, MOST_CONTEXTS))])
def test_a_shape_beyond_the_largest_is_refused(largest, shape):
    with pytest.raises(AssertionError, match="larger than the largest shape"):
        make(largest).of(shape)
