"""A step copies only its upload buffers to the device, and a plain step copies one. The engine is meta_engine.py."""

from dataclasses import replace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.runtime import packing
from batch_manager.runtime.forms.fixed.inputs import SPARE_CHANGES
from batch_manager.sampling_config import SamplingConfig

from .meta_engine import HIDDEN, META, SIZE, SLOTS, Engine, copies_from_the_host


def context(slot, length):
    return ContextWork(slot, np.zeros(length, np.int32), 0, True, SlotSetup(prompt_length=length))


def test_a_step_sends_its_arrays_in_one_copy_and_one_more_where_sequences_enter(monkeypatch):
    engine = Engine(monkeypatch)
    slots, indices = np.divmod(np.arange(4 * 10, dtype=np.int32), np.int32(10))
    tables = BlockTableUpdates(slots, indices, np.arange(40, dtype=np.int32))
    assert engine.run(ScheduledBatch(0, context=(context(0, 37), context(1, 5)), block_table_updates=tables)) == (2, [])

    for step, lengths in enumerate(([37, 5], [38, 6])):
        generation = GenerationWork(np.array([0, 1], np.int32), np.array(lengths, np.int32))
        assert engine.run(ScheduledBatch(1 + step, generation=generation)) == (1, [])
    generation = GenerationWork(np.array([0], np.int32), np.array([150], np.int32))     # attention splits this length
    assert engine.run(ScheduledBatch(3, context=(context(2, 3),), generation=generation,
                                     block_table_updates=tables)) == (2, [])
    assert engine.attention._generation.work[None][1] is not None


def generation(*rows):
    """Return the generation work of rows (slot, number of tokens in the KV cache)."""
    return GenerationWork(*np.array(rows, np.int32).reshape(-1, 2).T)


def tables_of(slots, num_blocks):
    rows, indices = np.divmod(np.arange(slots * num_blocks, dtype=np.int32), np.int32(num_blocks))
    return BlockTableUpdates(rows, indices, np.arange(len(rows), dtype=np.int32))


def test_a_plain_step_sends_one_buffer_whose_size_its_shape_gives(monkeypatch):
    engine = Engine(monkeypatch)
    # As many changes as fit into the step's own buffer. More changes, which take another copy, come later.
    fits = tables_of(2, (2 + SPARE_CHANGES) // 2)
    (size,), others = engine.run_plainly(ScheduledBatch(
        0, generation=generation((0, 37), (1, 5)), block_table_updates=fits))
    assert others == []
    assert engine.run_plainly(ScheduledBatch(1, generation=generation((1, 40), (0, 1)))) == ([size], [])
    found, others = engine.run_plainly(ScheduledBatch(
        2, generation=generation((1, 40), (0, 1)), block_table_updates=tables_of(8, 20)))
    assert (len(found), found[-1], others) == (2, size, [])


def test_a_step_with_contexts_sends_one_buffer_whose_size_its_shape_gives(monkeypatch):
    engine = Engine(monkeypatch)
    engine.steps.pad_to((8,))
    sizes = []
    for contexts, rows in (((context(0, 37), context(1, 5)), ()), ((context(2, 64),), ((0, 37), (1, 5))),
                           ((context(3, 1),), ((0, 38), (1, 6), (2, 64)))):
        engine.decoder.set_up((work.slot, work.setup) for work in contexts)
        (size,), others = engine.run_plainly(ScheduledBatch(
            0, context=contexts, generation=generation(*rows), block_table_updates=tables_of(4, 8)))
        assert others == []
        sizes.append(size)
    assert sizes[0] == sizes[1] < sizes[2]         # the last step splits a sequence, and also sends what is merged


def test_what_is_not_plain_is_known(monkeypatch):
    engine = Engine(monkeypatch)
    engine.run_plainly(ScheduledBatch(0, generation=generation((0, 1)), block_table_updates=tables_of(8, 20)))

    def serves(*rows, **changes):
        return engine.steps.serves(ScheduledBatch(1, generation=generation(*rows), **changes))

    assert serves((0, 37), (1, 5)) and serves((7, 20 * SIZE - 1)) and not serves((7, 20 * SIZE)) and not serves()
    assert not serves((0, 37), context=(context(1, 3),))
    setups = {1: SlotSetup(SamplingConfig(top_k=5, temperature=0.5, min_p=0.1), return_log_probs=True, end_id=4),
              2: SlotSetup(SamplingConfig(repetition_penalty=1.5), history=np.zeros(1, np.int32)),
              3: SlotSetup(stop_words=((5,),)), 4: SlotSetup(return_generation_logits=True),
              5: SlotSetup(SamplingConfig(top_p=0.5, top_p_decay=0.5), history=np.zeros(1, np.int32))}
    engine.decoder.set_up(setups.items())
    assert [slot for slot in range(8) if not serves((0, 3), (slot, 3))] == [2, 3, 4, 5]
    assert not engine.steps.serves(ScheduledBatch(1, generation=GenerationWork(
        np.zeros(1, np.int32), np.ones(1, np.int32), beam_width=2), max_beam_width=2))

    engine.decoder.set_up([(6, SlotSetup(return_context_logits=True)), (1, SlotSetup(SamplingConfig(top_k=5)))])
    assert serves((0, 37), (6, 5)) and not serves(context=(context(0, 3),))
    engine.steps.pad_to((8,))
    assert serves(context=(context(0, 3),)) and serves((0, 37), context=(context(1, 64),))
    assert not serves((0, 37), context=(context(1, 64), context(3, 1)))                  # too many tokens
    for slot in (2, 6):
        assert not serves((0, 37), context=(context(slot, 3),))
    for changes in ({"embeddings": np.zeros((1, HIDDEN), np.float32)}, {"num_drafts": 1}, {"start": 20 * SIZE - 2}):
        assert not serves(context=(replace(context(0, 3), **changes),))
    assert not serves((7, 20 * SIZE), context=(context(0, 3),))
    engine.decoder.set_up([(SLOTS - 1, SlotSetup())])
    assert serves((0, 37))
    engine.decoder.set_up([(SLOTS, SlotSetup())])           # from now on, a sequence has the slot of the padding rows
    assert not serves((0, 37)) and not serves(context=(context(0, 3),))
    engine.decoder.set_up([(0, SlotSetup())])
    assert not serves((0, 37))


def test_planning_touches_no_tensor(monkeypatch):
    engine = Engine(monkeypatch)
    generation = GenerationWork(np.array([0], np.int32), np.array([3], np.int32))
    engine.tables.update(ScheduledBatch(
        0, block_table_updates=BlockTableUpdates(*np.zeros((3, 1), np.int32))))
    (call,) = packing.packed(ScheduledBatch(0, generation=generation), engine.tables, SIZE)

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} while planning")

    with Nothing():
        planned = engine.attention.plan(call.step)
    assert [type(array) for array in planned] == [np.ndarray]


def test_a_copy_from_the_host_would_be_seen():
    there = torch.empty(3, 4, device=META)
    with copies_from_the_host() as copies:
        there[0].copy_(torch.zeros(4))
        torch.zeros(3).to(META)
        torch.zeros(3).to(META, non_blocking=True)
        there[1, 2] = 1.0
        there[torch.zeros(2, dtype=torch.int64, device=META)] = 1.0
        assert len(copies.found) == 5
        torch.zeros(3).add_(1)
        torch.zeros(3).pin_memory().to(META, non_blocking=True)
        there[1] = 1.0
        there[1, 2].fill_(1.0)
        there[1] = there[2]
    assert len(copies.found) == 5
