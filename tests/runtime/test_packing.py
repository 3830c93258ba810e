import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.handover import NO_UPDATES, BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.packing import pack


def updates(entries):
    """Return the BlockTableUpdates that write these block tables, {slot: [block ids]}."""
    rows = [(slot, index, block) for slot, blocks in entries.items() for index, block in enumerate(blocks)]
    return BlockTableUpdates(*np.array(rows, np.int32).reshape(-1, 3).T)


def context(slot, tokens, start, last, setup=None):
    return ContextWork(slot, np.array(tokens, np.int32), start, last, setup)


def generation(pairs):
    slots, lengths = zip(*pairs) if pairs else ((), ())
    return GenerationWork(np.array(slots, np.int32), np.array(lengths, np.int32))


def test_two_contexts_and_two_generation_rows_by_hand():
    tables = BlockTables(8, 4)
    batch = ScheduledBatch(
        iteration=0,
        context=(context(5, [11, 12, 13], 0, True, SlotSetup()), context(2, [21, 22, 23, 24], 4, False)),
        generation=generation([(7, 8), (0, 3)]),
        block_table_updates=updates({5: [9], 2: [3, 8], 7: [1, 2, 6], 0: [4]}))
    tables.update(batch)
    step = pack(batch, tables, 4)

    assert step.token_ids.tolist() == [11, 12, 13, 21, 22, 23, 24, 0, 0]
    assert step.positions.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 3]
    assert step.pool_slots.tolist() == [36, 37, 38, 32, 33, 34, 35, 24, 19]
    assert step.slots.tolist() == [5, 2, 7, 0]
    assert step.query_starts.tolist() == [0, 3, 7, 8, 9]
    assert step.kv_lengths.tolist() == [3, 8, 9, 4]
    assert step.block_tables.shape == (4, 3)
    assert step.block_tables[1].tolist()[:2] == [3, 8] and step.block_tables[2].tolist() == [1, 2, 6]
    assert step.num_contexts == 2
    assert step.logits_rows.tolist() == [2, 7, 8]
    assert (step.num_tokens, step.num_context_tokens) == (9, 7)


def test_draft_tokens_by_hand():
    """A batch with draft tokens is packed as computed by hand.

    Of the context in slot 5, the last two tokens are drafts. Of the generating slots, 7 has two drafts and 0 has none.
    """
    tables = BlockTables(8, 4)
    batch = ScheduledBatch(
        iteration=0,
        context=(ContextWork(5, np.array([11, 12, 13, 14], np.int32), 0, True, SlotSetup(), num_drafts=2),
                 context(2, [21, 22], 4, False)),
        generation=GenerationWork(np.array([7, 0], np.int32), np.array([6, 3], np.int32),
                                  num_drafts=np.array([2, 0], np.int32), draft_tokens=np.array([71, 72], np.int32)),
        block_table_updates=updates({5: [9], 2: [3, 8], 7: [1, 2, 6], 0: [4]}))
    tables.update(batch)
    step = pack(batch, tables, 4)

    assert step.token_ids.tolist() == [11, 12, 13, 14, 21, 22, 0, 71, 72, 0]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 3]
    assert step.pool_slots.tolist() == [36, 37, 38, 39, 32, 33, 10, 11, 24, 19]
    assert step.slots.tolist() == [5, 2, 7, 0]
    assert step.query_starts.tolist() == [0, 4, 6, 9, 10]
    assert step.kv_lengths.tolist() == [4, 6, 9, 4]
    assert (step.num_contexts, step.num_verifying) == (4, 2), "chunks for an attention, each of 1 + drafts tokens"
    assert step.logits_rows.tolist() == [1, 2, 3, 6, 7, 8, 9]

    alone = pack(batch.take(range(2, 4)), tables, 4)
    assert alone.token_ids.tolist() == [0, 71, 72, 0] and alone.logits_rows.tolist() == [0, 1, 2, 3]
    assert (alone.num_contexts, alone.num_verifying) == (2, 2)


def test_beams_by_hand():
    """A batch with beams is packed as computed by hand.

    Each slot has three rows in the block tables. Slot 2 has a context. Slots 1 and 0 generate with two beams each.
    """
    tables = BlockTables(1, 1)
    batch = ScheduledBatch(
        iteration=0, max_beam_width=3, context=(context(2, [21, 22], 0, True, SlotSetup()),),
        generation=GenerationWork(np.array([1, 0], np.int32), np.array([5, 2], np.int32), 2),
        block_table_updates=updates({6: [9], 7: [9], 3: [1, 2], 4: [1, 7], 0: [4], 1: [5]}))
    tables.update(batch)
    assert tables.mapped[:9].tolist() == [1, 1, 0, 2, 2, 0, 1, 1, 0]
    step = pack(batch, tables, 4)
    assert step.slots.tolist() == [2, 1, 1, 0, 0]
    assert step.positions.tolist() == [0, 1, 5, 5, 2, 2]
    assert step.pool_slots.tolist() == [36, 37, 9, 29, 18, 22]
    assert step.kv_lengths.tolist() == [2, 6, 6, 3, 3]
    assert step.block_tables[1:3].tolist() == [[1, 2], [1, 7]]
    assert step.logits_rows.tolist() == [1, 2, 3, 4, 5]

    alone = pack(batch.take(range(1, 2)), tables, 4)                 # a part of a batch has the same width
    assert alone.slots.tolist() == [1, 1] and alone.pool_slots.tolist() == [9, 29]


def test_a_generation_only_step_by_hand():
    tables = BlockTables(4, 2)
    batch = ScheduledBatch(iteration=0, generation=generation([(3, 7), (1, 8)]),
                           block_table_updates=updates({3: [5], 1: [7, 2]}))
    tables.update(batch)
    step = pack(batch, tables, 8)
    assert step.token_ids.tolist() == [0, 0]
    assert step.positions.tolist() == [7, 8]
    assert step.pool_slots.tolist() == [47, 16]
    assert step.query_starts.tolist() == [0, 1, 2]
    assert step.kv_lengths.tolist() == [8, 9]
    assert step.block_tables[1].tolist() == [7, 2]
    assert step.logits_rows.tolist() == [0, 1]
    assert step.num_context_tokens == 0


def test_the_arrays_have_the_documented_types():
    tables = BlockTables(2, 2)
    whole = ScheduledBatch(iteration=0, context=(context(0, [1, 2], 0, True, SlotSetup()),),
                           generation=generation([(1, 1)]), block_table_updates=updates({0: [1], 1: [0]}))
    tables.update(whole)
    for batch in (whole, whole.take(range(1, 2)), whole.take(range(1))):
        step = pack(batch, tables, 8)
        assert {name: getattr(step, name).dtype.name for name in (
            "token_ids", "positions", "pool_slots", "slots", "query_starts", "kv_lengths", "block_tables",
            "logits_rows")} == {
            "token_ids": "int32", "positions": "int32", "pool_slots": "int64", "slots": "int32",
            "query_starts": "int32", "kv_lengths": "int32", "block_tables": "int32", "logits_rows": "int64"}


def test_a_position_outside_the_mapped_blocks_is_an_assertion():
    tables = BlockTables(2, 4)
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates({0: [1, 2]})))
    pack(ScheduledBatch(iteration=0, generation=generation([(0, 15)])), tables, 8)
    with pytest.raises(AssertionError, match="do not fit"):
        pack(ScheduledBatch(iteration=0, generation=generation([(0, 16)])), tables, 8)


@pytest.mark.parametrize("stale", [-1, 5])
def test_entries_of_blocks_behind_a_window_do_not_matter(stale):
    tables = BlockTables(2, 4)
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates({0: [1, 2, 3], 1: [4]})))
    tables.update(ScheduledBatch(iteration=1, block_table_updates=updates({0: [stale, stale]})))
    assert tables.mapped.tolist() == [3, 1]
    both = ScheduledBatch(iteration=1, context=(context(1, [7, 7], 2, True),), generation=generation([(0, 17)]))
    for batch in (both, both.take(range(1, 2))):
        step = pack(batch, tables, 8)
        assert step.pool_slots[-1] == 3 * 8 + 1
        assert step.block_tables[-1].tolist() == [stale, stale, 3]


def test_a_token_whose_own_block_is_gone_is_an_assertion():
    tables = BlockTables(1, 4)
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates({0: [1, -1]})))
    for batch in (ScheduledBatch(iteration=0, generation=generation([(0, 9)])),
                  ScheduledBatch(iteration=0, context=(context(0, [1, 2], 8, True),))):
        with pytest.raises(AssertionError, match="given back"):
            pack(batch, tables, 8)


def test_the_blocks_of_a_slot_end_with_its_sequence():
    tables = BlockTables(1, 4)
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates({0: [1, 2, 3]})))
    successor = ScheduledBatch(iteration=1, context=(context(0, [1] * 9, 0, True, SlotSetup()),),
                               block_table_updates=updates({0: [7]}))
    tables.update(successor)
    with pytest.raises(AssertionError, match="do not fit"):
        pack(successor, tables, 8)


def test_tables_grow_by_doubling_and_keep_what_they_held():
    tables = BlockTables(2, 2)
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates({1: [5, 6]})))
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates({2: [7, 8, 9]})))
    assert tables.rows.shape == (4, 4)
    assert tables.rows[1, :2].tolist() == [5, 6] and tables.rows[2, :3].tolist() == [7, 8, 9]
    assert tables.mapped.tolist() == [0, 2, 3, 0]


def naive(batch, blocks, size):
    """Pack a batch token by token, in plain Python, as an oracle of `pack`.

    Returns lists: token ids, positions, pool slots, query starts, KV lengths and logits rows.

    blocks   slot -> block ids
    size     tokens per block
    """
    tokens, positions, pool_slots, starts, lengths, rows = [], [], [], [0], [], []
    work = [(w.slot, w.token_ids.tolist(), w.start, w.is_last_chunk) for w in batch.context]
    work += [(s, [0], n, True) for s, n in zip(batch.generation.slots.tolist(), batch.generation.kv_lengths.tolist())]
    for slot, ids, start, yields in work:
        for offset, token in enumerate(ids):
            tokens.append(token)
            positions.append(start + offset)
            pool_slots.append(blocks[slot][(start + offset) // size] * size + (start + offset) % size)
        starts.append(len(tokens))
        lengths.append(start + len(ids))
        if yields:
            rows.append(len(tokens) - 1)
    return tokens, positions, pool_slots, starts, lengths, rows


@st.composite
def batches(draw):
    size = draw(st.sampled_from([1, 2, 8, 64]))
    num_contexts, num_rows = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    if num_contexts + num_rows == 0:
        num_rows = 1
    slots = draw(st.permutations(range(num_contexts + num_rows)))
    contexts = tuple(
        context(slot, draw(st.lists(st.integers(0, 99), min_size=1, max_size=9)), draw(st.integers(0, 20)),
                draw(st.booleans()), draw(st.sampled_from([None, SlotSetup()])))
        for slot in slots[:num_contexts])
    rows = generation([(slot, draw(st.integers(1, 40))) for slot in slots[num_contexts:]])
    lengths = {work.slot: work.start + len(work.token_ids) for work in contexts}
    lengths |= {slot: length + 1 for slot, length in zip(rows.slots.tolist(), rows.kv_lengths.tolist())}
    ids = iter(draw(st.permutations(range(sum(-(-length // size) for length in lengths.values())))))
    blocks = {slot: [next(ids) for _ in range(-(-length // size))] for slot, length in lengths.items()}
    batch = ScheduledBatch(iteration=0, context=contexts, generation=rows, block_table_updates=updates(blocks))
    return batch, blocks, size


@given(batches())
def test_any_batch_packs_as_the_naive_implementation_packs_it(case):
    batch, blocks, size = case
    tables = BlockTables(1, 1)
    tables.update(batch)
    step = pack(batch, tables, size)
    tokens, positions, pool_slots, starts, lengths, rows = naive(batch, blocks, size)
    assert step.token_ids.tolist() == tokens
    assert step.positions.tolist() == positions
    assert step.pool_slots.tolist() == pool_slots
    assert step.query_starts.tolist() == starts
    assert step.kv_lengths.tolist() == lengths
    assert step.logits_rows.tolist() == rows
    assert step.slots.tolist() == batch.slots()
    for row, slot in zip(step.block_tables.tolist(), batch.slots()):
        assert row[: len(blocks[slot])] == blocks[slot]


def test_packing_256_generation_rows_is_cheap():
    tables = BlockTables(256, 16)
    tables.update(ScheduledBatch(iteration=0, block_table_updates=updates(
        {slot: range(16 * slot, 16 * slot + 16) for slot in range(256)})))
    slots, best = np.arange(256, dtype=np.int32), 1.0
    for step in range(500):
        batch = ScheduledBatch(step, 0, (), GenerationWork(slots, np.full(256, 500 + step, np.int32)), NO_UPDATES)
        begin = time.perf_counter()
        tables.update(batch)
        pack(batch, tables, 64)
        best = min(best, time.perf_counter() - begin)
    print(f"{best * 1e6:.1f} us")
    assert best < 400e-6                                          # 40 us alone; up to ten times that on a busy machine
