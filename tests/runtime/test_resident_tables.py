import numpy as np
import torch

from batch_manager.handover import BlockTableUpdates, ScheduledBatch
from batch_manager.runtime import resident_tables
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.resident_tables import ResidentTables

ROWS, BLOCKS = 6, 9


def updates(draw, count, rows=ROWS, blocks=BLOCKS):
    return BlockTableUpdates(*(draw.integers(0, most, count).astype(np.int32) for most in (rows, blocks, 1000)))


def test_the_device_gets_every_entry_that_changed_once_as_it_is_when_it_is_sent():
    draw = np.random.default_rng(0)
    tables, resident = BlockTables(ROWS, BLOCKS), ResidentTables(ROWS, BLOCKS, torch.device("cpu"))
    for number in range(200):
        for _ in range(draw.integers(0, 4)):                    # steps that do not read this table
            given = updates(draw, draw.integers(0, 7))
            tables.update(ScheduledBatch(0, block_table_updates=given))
            resident.note(given)
        entries, blocks = resident.changes(tables)
        assert len(np.unique(entries)) == len(entries) == len(blocks)
        assert (entries.dtype, blocks.dtype) == (np.int64, np.int32)
        if number % 3 == 0:                                     # a step that fails before its launch
            continue
        resident.tensor.view(-1)[torch.from_numpy(entries)] = torch.from_numpy(blocks)
        resident.are_sent()
        assert len(resident.changes(tables)[0]) == 0
        assert np.array_equal(resident.tensor[:ROWS].numpy(), tables.rows)


def test_changes_that_no_step_reads_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(resident_tables, "MOST_NOTED", 100)
    draw = np.random.default_rng(0)
    resident = ResidentTables(ROWS, BLOCKS, torch.device("cpu"))
    for _ in range(500):
        resident.note(updates(draw, 7))
    assert sum(map(len, resident._changed)) <= 2 * ROWS * BLOCKS + 107
    assert len(resident.changes(BlockTables(ROWS, BLOCKS))[0]) == ROWS * BLOCKS


def test_rows_and_columns_that_the_table_has_not_are_left_out():
    tables, resident = BlockTables(ROWS, BLOCKS), ResidentTables(ROWS, BLOCKS, torch.device("cpu"))
    given = BlockTableUpdates(*np.array([[ROWS, 1, 5], [2, BLOCKS, 6], [2, 3, 7]], np.int32).T)
    tables.update(ScheduledBatch(0, block_table_updates=given))
    resident.note(given)
    entries, blocks = resident.changes(tables)
    assert (entries.tolist(), blocks.tolist()) == ([2 * BLOCKS + 3], [7])
    assert resident.spare_entry == ROWS * BLOCKS and resident.tensor.shape == (ROWS + 1, BLOCKS)
