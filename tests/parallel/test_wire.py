"""Values of ranks as bytes: everything that a STEP frame has arrives as it was, and nothing else is read."""

from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest

from batch_manager.adapter_values import AdapterContent, AdapterPart
from batch_manager.handover import (
    NO_GENERATION,
    NO_UPDATES,
    AdapterLoad,
    BlockClear,
    BlockCopy,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.parallel.wire import CLASSES, FIELDS, MOST_ITEMS, WireError, pack, unpack
from batch_manager.sampling_config import SamplingConfig


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def drawn_batch(rng: Random) -> ScheduledBatch:
    """Return a batch with every field of every class, drawn by `rng`."""
    def array(length: int) -> np.ndarray:
        return int32(*[rng.randrange(-2**31, 2**31) for _ in range(length)])

    length = rng.randrange(4)
    context = tuple(ContextWork(
        rng.randrange(300), array(rng.randrange(1, 40)), rng.randrange(10**6), rng.random() < 0.5,
        rng.choice([None, SlotSetup(SamplingConfig(temperature=0.5), request_id=2**64 - 1, stop_words=((1, 2),),
                                    adapter_pages=rng.choice([(), (4, 7)]))]),
        rng.choice([None, np.float32(rng.random()) * np.ones((2, 8), np.float32)]), rng.randrange(3))
        for _ in range(rng.randrange(3)))
    parts = tuple(AdapterPart("attn_q", layer, np.ones((2, 3), dtype), np.zeros((4, 2), dtype))
                  for layer, dtype in enumerate(("float32", "float16", "uint16")))
    content = rng.choice([None, AdapterContent(bytes(range(32)), "float32", parts, 99, 2)])
    generation = rng.choice([NO_GENERATION, GenerationWork(array(length), array(length), rng.randrange(1, 5)),
                             GenerationWork(array(length), array(length), 1, array(length), array(7))])
    return ScheduledBatch(
        rng.randrange(2**40), rng.randrange(2), context, generation,
        rng.choice([NO_UPDATES, BlockTableUpdates(array(3), array(3), array(3))]), rng.randrange(9),
        rng.randrange(1, 5),
        rng.choice([(), (BlockCopy(1, 2, 3, True, False), BlockClear(4, 5), AdapterLoad(2**63 + 1, (6, 7), content))]),
        rng.randrange(2**50))


def same(first, second) -> bool:
    if type(first) is not type(second):
        return False
    if type(first) is np.ndarray:
        return first.dtype == second.dtype and np.array_equal(first, second) and second.flags.writeable
    if type(first) is tuple:
        return len(first) == len(second) and all(map(same, first, second))
    if type(first) is SlotSetup:
        return second == SlotSetup(adapter_pages=first.adapter_pages, return_context_logits=first.return_context_logits)
    if type(first) in FIELDS:
        return all(same(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    return first == second


def test_a_batch_arrives_as_it_was_but_for_the_options_of_its_sequences():
    for seed in range(200):
        batch = drawn_batch(Random(seed))
        assert same(batch, unpack(pack(batch)))
    arrived = unpack(pack(ScheduledBatch(0)))
    assert arrived.generation is NO_GENERATION and arrived.block_table_updates is NO_UPDATES


@pytest.mark.parametrize("value", [
    None, True, False, 0, -1, 2**63 - 1, -2**63, 2**63, 2**64 - 1, 0.5, float("inf"), "", "é\ud800\n", b"", b"\0\xff",
    (), (1, ("a", (None, (2.5,)))), *[np.zeros((2, 0, 3), dtype) for dtype in ("int64", "bool", "float16", "uint8")]])
def test_a_plain_value_arrives_as_it_was(value):
    assert same(value, unpack(pack(value)))


def test_every_field_of_every_class_may_have_a_value():
    """A new field of handover.py with a type that is not in the lists would not travel."""
    for cls in CLASSES:
        assert [field.name for field in FIELDS[cls] if not field.kinds] == []


@pytest.mark.parametrize("value", [[], {}, {1}, object(), 2**64, -2**63 - 1, np.float32(1), np.zeros(1, complex),
                                   np.zeros((1,) * 5), np.array(["a"]), np.array([None]), 1j, ValueError(),
                                   SamplingConfig(), bytearray(b"a"), range(3)])
def test_a_value_of_another_type_does_not_travel(value):
    with pytest.raises(WireError):
        pack((value,))


def test_values_too_deep_do_not_travel():
    value = ()
    for _ in range(20):
        value = (value,)
    with pytest.raises(WireError):
        pack(value)


def test_bytes_that_are_cut_or_altered_are_an_error_or_another_value_and_never_anything_else():
    """No code is run, and no memory is taken for a length that the bytes do not have."""
    data = pack((7, drawn_batch(Random(5)), "text", (1.5, b"x")))
    for cut in range(len(data)):
        with pytest.raises(WireError):
            unpack(data[:cut])
    with pytest.raises(WireError):
        unpack(data + b"\0")
    rng = Random(1)
    for _ in range(5000):
        altered = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            altered[rng.randrange(len(altered))] = rng.randrange(256)
        try:
            unpack(bytes(altered))
        except WireError:
            continue


@pytest.mark.parametrize("batch", [
    replace(ScheduledBatch(0), iteration="text"), replace(ScheduledBatch(0), iteration=True),
    replace(ScheduledBatch(0), context=(1,)), replace(ScheduledBatch(0), operations=(NO_UPDATES,)),
    replace(ScheduledBatch(0), generation=None), replace(ScheduledBatch(0), context=int32(1)),
    replace(ScheduledBatch(0), generation=GenerationWork(np.zeros(1, np.int64), int32(1))),
    replace(ScheduledBatch(0), generation=GenerationWork(np.zeros(1, np.float32), int32(1)))])
def test_a_field_with_a_value_of_another_type_is_not_read(batch):
    with pytest.raises(WireError):
        unpack(pack(batch))


def test_a_tuple_has_a_longest_length():
    with pytest.raises(WireError):
        pack((None,) * (MOST_ITEMS + 1))
