"""Each layout (fused, split, padded) turns a batch into the right model calls, and padding changes no result."""

import numpy as np
import pytest
import torch

from batch_manager.attention.interface import PackedStep
from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.runtime import packing
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.forms.packed.forwards import PaddedAttention

SIZE = 4


def make(contexts=(), rows=(), num_padded_rows=0):
    """Return a batch.

    contexts   lengths of the prompts, in slots 0, 1, ...
    rows       KV lengths of the generating sequences, in the slots after the prompts
    """
    slots = np.arange(len(contexts), len(contexts) + len(rows), dtype=np.int32)
    works = tuple(ContextWork(slot, np.arange(1, count + 1, dtype=np.int32), 0, True, SlotSetup())
                  for slot, count in enumerate(contexts))
    mapped = [(slot, index, 5 * slot + index) for slot in range(len(contexts) + len(rows)) for index in range(5)]
    return ScheduledBatch(0, context=works, generation=GenerationWork(slots, np.array(rows, np.int32)),
                          block_table_updates=BlockTableUpdates(*np.array(mapped, np.int32).T),
                          num_padded_rows=num_padded_rows)


def calls(layout, batch):
    tables = BlockTables(8, 5)
    tables.update(batch)
    return layout(batch, tables, SIZE)


def test_contexts_are_padded_to_the_longest_of_them():
    (call,) = calls(packing.padded, make(contexts=[2, 4, 1]))
    assert call.padding.rows.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert call.padding.num_rows == 12
    assert call.padding.rows.dtype == np.int64


def test_generation_is_padded_to_the_places_of_the_batch():
    (call,) = calls(packing.padded, make(rows=[3, 9], num_padded_rows=5))
    assert call.padding.rows.tolist() == [0, 1]
    assert call.padding.num_rows == 5


@pytest.mark.parametrize("batch", [make(contexts=[3, 3]), make(contexts=[5]), make(rows=[3, 9], num_padded_rows=2),
                                   make(rows=[3, 9])])
def test_where_all_are_of_one_length_there_is_no_padding(batch):
    assert [call.padding for call in calls(packing.padded, batch)] == [None]


def test_a_mixed_step_is_two_padded_calls():
    first, second = calls(packing.padded, make(contexts=[1, 2], rows=[3, 9]))
    assert (first.padding.num_rows, second.padding) == (4, None)


def test_what_is_padded_is_packed_as_ever():
    for batch in (make(contexts=[2, 4, 1]), make(rows=[3, 9], num_padded_rows=5)):
        (padded,), (packed,) = calls(packing.padded, batch), calls(packing.split, batch)
        for name in PackedStep.__slots__:
            np.testing.assert_array_equal(getattr(padded.step, name), getattr(packed.step, name))
        assert packed.padding is None


def test_an_attention_sees_the_rows_of_tokens_alone_and_padding_gets_zeros():
    class Doubling:
        dispatch = "torch"

        def run(self, layer, query, key, value, rotary):
            self.seen = query, key, value
            return 2 * query.flatten(1)

    inner, rows = Doubling(), torch.tensor([0, 3, 4])
    query, key, value = (torch.full((6, 2, 3), torch.nan) for _ in range(3))
    for number, tensor in enumerate((query, key, value), 1):
        tensor[rows] = torch.arange(3.0)[:, None, None] + 10 * number
    attended = PaddedAttention(inner, rows, 6).run(0, query, key, value, None)
    assert all(torch.equal(seen, tensor[rows]) for seen, tensor in zip(inner.seen, (query, key, value)))
    assert torch.equal(attended[rows], 2 * query[rows].flatten(1))
    assert not attended[[1, 2, 5]].any()


def test_padding_writes_nothing_to_the_cache(checkpoint):
    """The KV cache keeps its content bit by bit at every position for which the batch has no token."""
    params = TrtGptModelOptionalParams(device="cpu", kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=320))
    backend = build_native_backend(checkpoint[0], params, layout=packing.padded, num_slots=8)
    mark = -12345.0
    with torch.inference_mode():
        backend._parts.pool.fill_(mark)
    contexts, table = [2, 11, 5], {0: [31], 1: [4, 17], 2: [9]}
    updates = BlockTableUpdates(*np.array([(slot, index, block) for slot, blocks in table.items()
                                           for index, block in enumerate(blocks)], np.int32).T)
    works = tuple(ContextWork(slot, np.arange(1, count + 1, dtype=np.int32), 0, True, SlotSetup())
                  for slot, count in enumerate(contexts))
    backend.start(ScheduledBatch(0, context=works, block_table_updates=updates, num_padded_rows=3)).finish()
    backend.start(ScheduledBatch(1, generation=GenerationWork(np.array([1], np.int32), np.array([11], np.int32)),
                                 num_padded_rows=3)).finish()

    written = (backend._parts.pool != mark).all(dim=(1, 2, 3, 5))            # [num_blocks, tokens_per_block]
    untouched = (backend._parts.pool == mark).all(dim=5).all(dim=3).all(dim=2).all(dim=1)
    expected = torch.zeros_like(written)
    for slot, count in enumerate([2, 12, 5]):
        for position in range(count):
            expected[table[slot][position // 8], position % 8] = True
    assert torch.equal(written, expected) and torch.equal(untouched, ~expected)
