import numpy as np

from batch_manager.handover import BlockTableUpdates, ScheduledBatch
from batch_manager.runtime import block_tables
from batch_manager.runtime.block_tables import BlockTables

ROWS, BLOCKS = 6, 9


def updates(draw, count, rows=ROWS, blocks=BLOCKS):
    return BlockTableUpdates(*(draw.integers(0, most, count).astype(np.int32) for most in (rows, blocks, 1000)))


def tables_with_a_copy():
    return BlockTables(ROWS, BLOCKS, copied=(ROWS, BLOCKS))


def test_a_copy_gets_every_entry_that_changed_once_as_it_is_when_it_is_sent():
    draw = np.random.default_rng(0)
    tables, copy = tables_with_a_copy(), np.zeros((ROWS, BLOCKS), np.int32)
    for number in range(200):
        for _ in range(draw.integers(0, 4)):                    # steps that do not send the changes
            tables.update(ScheduledBatch(0, block_table_updates=updates(draw, draw.integers(0, 7))))
        entries, blocks = tables.changes()
        assert len(np.unique(entries)) == len(entries) == len(blocks)
        assert (entries.dtype, blocks.dtype) == (np.int64, np.int32)
        if number % 3 == 0:                                     # a step that fails before its launch
            continue
        copy.ravel()[entries] = blocks
        tables.forget_changes()
        assert len(tables.changes()[0]) == 0
        assert np.array_equal(copy, tables.rows)


def test_changes_that_no_step_sends_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(block_tables, "MOST_NOTED", 100)
    draw, tables = np.random.default_rng(0), tables_with_a_copy()
    for _ in range(500):
        tables.update(ScheduledBatch(0, block_table_updates=updates(draw, 7)))
    assert sum(map(len, tables._changed)) <= 2 * ROWS * BLOCKS + 107
    assert len(tables.changes()[0]) == ROWS * BLOCKS


def test_rows_and_columns_that_the_copy_has_not_are_left_out_and_without_a_copy_nothing_is_noted():
    given = BlockTableUpdates(*np.array([[ROWS, 1, 5], [2, BLOCKS, 6], [2, 3, 7]], np.int32).T)
    for copied, expected in (((ROWS, BLOCKS), ([2 * BLOCKS + 3], [7])), (None, ([], []))):
        tables = BlockTables(ROWS, BLOCKS, copied)
        tables.update(ScheduledBatch(0, block_table_updates=given))
        assert tuple(array.tolist() for array in tables.changes()) == expected
