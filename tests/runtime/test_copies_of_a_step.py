"""A step copies only its upload buffers to the device, and with inputs at fixed addresses one buffer.

The engine is meta_engine.py.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.runtime import packing
from batch_manager.runtime.forms.fixed.inputs import SPARE_CHANGES
from batch_manager.runtime.forms.form import words_of
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


def test_a_step_at_fixed_addresses_sends_one_buffer_whose_size_its_shape_gives(monkeypatch):
    engine = Engine(monkeypatch)
    # As many changes as fit into the step's own buffer. More changes, which take another copy, come later.
    fits = tables_of(2, (2 + SPARE_CHANGES) // 2)
    (size,), others = engine.run_in("fixed", ScheduledBatch(
        0, generation=generation((0, 37), (1, 5)), block_table_updates=fits))
    assert others == []
    assert engine.run_in("fixed", ScheduledBatch(1, generation=generation((1, 40), (0, 1)))) == ([size], [])
    found, others = engine.run_in("fixed", ScheduledBatch(
        2, generation=generation((1, 40), (0, 1)), block_table_updates=tables_of(8, 20)))
    assert (len(found), found[-1], others) == (2, size, [])


def test_a_step_with_contexts_sends_one_buffer_whose_size_its_shape_gives(monkeypatch):
    engine = Engine(monkeypatch)
    sizes = []
    for contexts, rows in (((context(0, 37), context(1, 5)), ()), ((context(2, 64),), ((0, 37), (1, 5))),
                           ((context(3, 1),), ((0, 38), (1, 6), (2, 64)))):
        engine.decoder.set_up((work.slot, work.setup) for work in contexts)
        (size,), others = engine.run_in("graph", ScheduledBatch(
            0, context=contexts, generation=generation(*rows), block_table_updates=tables_of(4, 8)))
        assert others == []
        sizes.append(size)
    assert sizes[0] == sizes[1] < sizes[2]         # the last step splits a sequence, and also sends what is merged


def test_what_keeps_a_batch_from_fixed_addresses_is_named(monkeypatch):
    engine = Engine(monkeypatch)
    engine.run_in("fixed", ScheduledBatch(0, generation=generation((0, 1)), block_table_updates=tables_of(8, 20)))

    def words(*rows, form="fixed", **changes):
        return words_of(engine.obstacle(form, ScheduledBatch(1, generation=generation(*rows), **changes)))

    for form in ("fixed", "graph"):
        assert words((0, 37), (1, 5), form=form) == words((7, 20 * SIZE - 1), form=form) == []
        assert words((7, 20 * SIZE), form=form) == ["length"]
    assert words((0, 37), context=(context(1, 3),)) == ["contexts"]
    setups = {1: SlotSetup(SamplingConfig(top_k=5, temperature=0.5, min_p=0.1), return_log_probs=True, end_id=4),
              2: SlotSetup(SamplingConfig(repetition_penalty=1.5), history=np.zeros(1, np.int32)),
              3: SlotSetup(stop_words=((5,),)), 4: SlotSetup(return_generation_logits=True),
              5: SlotSetup(SamplingConfig(top_p=0.5, top_p_decay=0.5), history=np.zeros(1, np.int32))}
    engine.decoder.set_up(setups.items())
    assert {slot: words((0, 3), (slot, 3)) for slot in range(1, 7)} == {
        1: [], 2: ["stages", "history"], 3: ["stop words"], 4: ["generation logits"], 5: ["stages"], 6: []}

    engine.decoder.set_up([(6, SlotSetup(return_context_logits=True)), (1, SlotSetup(SamplingConfig(top_k=5)))])
    assert words((0, 37), (6, 5)) == []
    of_graphs = partial(words, form="graph")
    assert of_graphs(context=(context(0, 3),)) == of_graphs((0, 37), context=(context(1, 64),)) == []
    assert of_graphs((0, 37), context=(context(1, 64), context(3, 1))) == ["stop words"]
    assert of_graphs((0, 37), context=(context(1, 64), context(7, 1))) == ["context tokens"]
    assert of_graphs((0, 37), context=(context(6, 3),)) == ["context logits"]
    assert of_graphs(context=(context(1, 1),) * 33) == ["contexts at once"]
    assert of_graphs(*[(slot, 3) for slot in (0, 1, 6, 7)] * 3) == ["rows"]
    for changes, word in (({"embeddings": np.zeros((1, HIDDEN), np.float32)}, "embeddings"),
                          ({"num_drafts": 1}, "context drafts"), ({"start": 20 * SIZE - 2}, "length")):
        assert of_graphs(context=(replace(context(0, 3), **changes),)) == [word]
    assert of_graphs((7, 20 * SIZE), context=(context(0, 3),)) == ["length"]
    engine.decoder.set_up([(SLOTS - 1, SlotSetup())])
    assert words((0, 37)) == []
    engine.decoder.set_up([(SLOTS, SlotSetup())])           # from now on, a sequence has the slot of the padding rows
    assert words((0, 37)) == of_graphs((0, 37)) == of_graphs(context=(context(0, 3),)) == ["slots"]
    engine.decoder.set_up([(0, SlotSetup())])
    assert words((0, 37)) == ["slots"]


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
