"""On each backend, a sequence gets the tokens of a run alone, in random batches, chunks, pauses, slots and blocks."""

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch

from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import (
    BlockClear,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.sampling_config import PARAMETERS, SamplingConfig
from batch_manager.testing.scripted_backend import ScriptedBackend

VOCAB, SIZE, BLOCKS, SLOTS, MAX_LENGTH = 160, 8, 30, 6, 56


@dataclass
class Sequence:
    prompt: list
    count: int
    setup: SlotSetup
    generated: list = field(default_factory=list)
    context: list = field(default_factory=list)     # tokens to compute before it generates
    computed: int = 0
    slot: int | None = None
    blocks: list = field(default_factory=list)


class Schedule:
    """Runs sequences on a backend in random order, with chunks, batches and pauses. Some steps run again in two parts.

    With a window, the schedule takes back blocks that leave it, fills them with NaN, and soon gives them to another
    sequence.
    """

    def __init__(self, backend, sequences, seed, window=None, sink=0):
        self.backend, self.waiting, self.running = backend, list(sequences), []
        self.random = np.random.default_rng(seed)
        self.free_slots, self.free_blocks = list(range(SLOTS)), list(range(BLOCKS))
        self.window, self.sink, self.runs_twice = window, sink, True
        self.pauses = self.reruns = self.taken_back = self.followed = 0
        operations = getattr(backend, "_operations", None)              # of the native backend
        self.num_operations = backend._num_operations if operations is None else operations.num_done

    def run(self):
        while self.waiting or self.running:
            self.pause_somebody()
            self.admit()
            batch = self.plan()
            if batch.num_sequences:
                self.num_operations += len(batch.operations)
                for part in self.launches(batch):
                    self.take(self.backend.start(part).finish())
                if self.window:
                    self.take_back()

    def admit(self):
        while self.waiting and self.free_slots and self.random.random() < 0.7:
            sequence = self.waiting.pop(self.random.integers(len(self.waiting)))
            sequence.context = sequence.prompt + sequence.generated
            sequence.slot = self.free_slots.pop(self.random.integers(len(self.free_slots)))
            sequence.computed = 0
            self.running.append(sequence)

    def pause_somebody(self):
        if self.running and self.random.random() < 0.08:
            self.release(self.running[self.random.integers(len(self.running))], pause=True)
            self.pauses += 1

    def release(self, sequence, pause):
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        self.free_blocks += [block for block in sequence.blocks if block is not None]
        sequence.slot, sequence.blocks = None, []
        if pause:
            self.waiting.append(sequence)

    def plan(self):
        contexts, rows, updates, clears = [], [], [], []
        for index in self.random.permutation(len(self.running)):
            sequence = self.running[index]
            left = len(sequence.context) - sequence.computed
            if self.random.random() < 0.3 and left <= 0:
                continue
            size = left
            if left > SIZE and self.random.random() < 0.5:
                size = SIZE * int(self.random.integers(1, (left - 1) // SIZE + 1))
            before = len(sequence.blocks)
            new = self.blocks_for(sequence, sequence.computed + max(size, 1))
            if new is None:
                continue
            updates += new
            clears += [BlockClear(block_id) for _, index, block_id in new if index >= before]
            if left > 0:
                tokens = np.array(sequence.context[sequence.computed: sequence.computed + size], np.int32)
                setup = sequence.setup.continuing(sequence.context) if sequence.computed == 0 else None
                contexts.append(ContextWork(sequence.slot, tokens, sequence.computed, size == left, setup))
            else:
                rows.append((sequence.slot, sequence.computed))
        generation = GenerationWork(*np.array(rows, np.int32).reshape(-1, 2).T)
        return ScheduledBatch(iteration=0, context=tuple(contexts), generation=generation,
                              block_table_updates=BlockTableUpdates(*np.array(updates, np.int32).reshape(-1, 3).T),
                              operations=tuple(clears) if self.window else (), first_operation=self.num_operations)

    def blocks_for(self, sequence, length):
        """Allocate the blocks that the sequence lacks for `length` tokens. Return the block-table entries to write.

        Returns None, and allocates nothing, if there are too few free blocks.
        """
        missing = -(-length // SIZE) - len(sequence.blocks)
        if missing > len(self.free_blocks):
            return None
        first = len(sequence.blocks)
        for _ in range(missing):
            sequence.blocks.append(self.free_blocks.pop(self.random.integers(len(self.free_blocks))))
        # The device has the earlier entries, unless the sequence starts with a setup.
        begin = 0 if sequence.computed == 0 else first
        return [(sequence.slot, index, sequence.blocks[index]) for index in range(begin, len(sequence.blocks))]

    def launches(self, batch):
        count = batch.num_sequences
        if self.runs_twice and count > 1 and self.random.random() < 0.2:     # as after an exception
            tokens = self.backend.start(batch).finish()
            self.reruns += 1
            if self.random.random() < 0.6:                                   # the parts run after the following step
                self.run_ahead(batch, tokens.slots)
            middle = int(self.random.integers(1, count))
            parts = [batch.take(range(middle)), batch.take(range(middle, count))]
        else:
            parts = [batch]
        for work in batch.context:
            self.by_slot(work.slot).computed += len(work.token_ids)
        for slot in batch.generation.slots.tolist():
            self.by_slot(slot).computed += 1
        return parts

    def run_ahead(self, batch, slots):
        """Run the generation step that follows a batch, for those of `slots` that have blocks for it. Drop its output.

        It imitates a step that was launched before the batch failed.
        """
        lengths = {work.slot: work.start + len(work.token_ids) for work in batch.context}
        lengths |= dict(zip(batch.generation.slots.tolist(), (batch.generation.kv_lengths + 1).tolist()))
        rows = [(slot, lengths[slot]) for slot in slots.tolist()
                if lengths[slot] < len(self.by_slot(slot).blocks) * SIZE]
        if rows:
            self.backend.start(ScheduledBatch(
                iteration=0, generation=GenerationWork(*np.array(rows, np.int32).T),
                first_operation=self.num_operations)).finish()
            self.followed += 1

    def take(self, output):
        assert output.failures == {}
        for slot, token in zip(output.slots.tolist(), output.tokens.tolist()):
            sequence = self.by_slot(slot)
            sequence.generated.append(token)
            if len(sequence.generated) == sequence.count:
                self.release(sequence, pause=False)

    def take_back(self):
        for sequence in self.running:
            for index in range(-(-self.sink // SIZE), max(sequence.computed - self.window + 1, 0) // SIZE):
                if sequence.blocks[index] is not None:
                    if isinstance(self.backend, ScriptedBackend):
                        self.backend.poison_blocks(sequence.blocks[index : index + 1])
                    else:
                        with torch.inference_mode():
                            self.backend._parts.pool[sequence.blocks[index]] = torch.nan
                    self.free_blocks.append(sequence.blocks[index])
                    sequence.blocks[index] = None
                    self.taken_back += 1

    def by_slot(self, slot):
        return next(sequence for sequence in self.running if sequence.slot == slot)


def sequences_of(count, seed):
    random = np.random.default_rng(seed)
    setups = [SlotSetup(), SlotSetup(SamplingConfig(top_k=20, random_seed=7)),
              SlotSetup(SamplingConfig(temperature=0.8, top_p=0.9, random_seed=2**64 - 1)),
              SlotSetup(SamplingConfig(top_k=1)), SlotSetup(SamplingConfig(temperature=1.2, top_p=1.0, random_seed=3))]
    return [Sequence(random.integers(0, VOCAB, random.integers(1, 36)).tolist(), int(random.integers(1, 20)),
                     setups[i % len(setups)]) for i in range(count)]


def with_features(sequences):
    """Give the sequences penalties, bans and other options with which logits depend on earlier tokens.

    Changes and returns the sequences.
    """
    features = [dict(repetition_penalty=1.5, no_repeat_ngram_size=2), dict(top_p=0.9, top_p_decay=0.8, top_p_min=0.3),
                dict(presence_penalty=0.7, frequency_penalty=0.3, bad_words=((3,), (5, 7))), dict(min_p=0.1, top_p=1.0),
                dict(end_id=4, min_length=9, embedding_bias=np.linspace(3, 0, VOCAB, dtype=np.float32)), {}]
    for i, sequence in enumerate(sequences):
        others = dict(features[i % len(features)])
        sampling = {name: others.pop(name) for name in PARAMETERS if name in others}
        sequence.setup = replace(sequence.setup, sampling=replace(sequence.setup.sampling, **sampling),
                                 prompt_length=len(sequence.prompt), **others)
    return sequences


def alone(backend, sequence, *mask):
    single = Sequence(sequence.prompt, sequence.count, sequence.setup)
    schedule = Schedule(backend, [single], 0, *mask)
    schedule.pause_somebody = lambda: None
    schedule.run()
    return single.generated


def check_against_the_hash(backend, sequences):
    for sequence in sequences:
        sampling = sequence.setup.sampling
        assert sequence.generated == backend.expected(
            sequence.prompt, sequence.count, random_seed=None if sampling.is_greedy else sampling.random_seed)


MASKS = pytest.mark.parametrize("mask", [(), (10, 0), (13, 3), (16, 9)], ids=["all", "window", "sinks", "more sinks"])


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "carried along"])
@MASKS
@pytest.mark.parametrize("seed", range(5))
def test_on_the_scripted_backend_under_a_window(seed, mask, verify):
    backend = ScriptedBackend(vocab_size=VOCAB, max_seq_len=MAX_LENGTH, num_blocks=BLOCKS, tokens_per_block=SIZE,
                              num_slots=2, key=seed, verify=verify, **dict(zip(("window", "sink"), mask)))
    sequences = sequences_of(25, seed)
    schedule = Schedule(backend, sequences, seed, *mask)
    schedule.runs_twice = verify
    schedule.run()
    assert bool(mask) == bool(schedule.taken_back)
    check_against_the_hash(backend, sequences)


@pytest.mark.parametrize("seed", range(20))
def test_on_the_scripted_backend(seed):
    backend = ScriptedBackend(vocab_size=VOCAB, max_seq_len=MAX_LENGTH, num_blocks=BLOCKS, tokens_per_block=SIZE,
                              num_slots=2, key=seed)
    sequences = sequences_of(25, seed)
    schedule = Schedule(backend, sequences, seed)
    schedule.run()
    assert schedule.pauses and schedule.reruns and schedule.followed
    check_against_the_hash(backend, sequences)


def native_backend(checkpoint, layout, mask):
    kv = KvCacheConfig(tokens_per_block=SIZE, max_tokens=BLOCKS * SIZE,
                       **dict(zip(("max_attention_window", "sink_token_length"), mask)))
    params = TrtGptModelOptionalParams(device="cpu", kv_cache_config=kv)
    return build_native_backend(checkpoint[0], params, layout=layout, num_slots=2)


@pytest.fixture(scope="module")
def texts_of(checkpoint):
    """Return the function mask -> the tokens of each sequence in packed steps of its own."""
    @cache
    def texts(mask):
        backend = native_backend(checkpoint, packing.packed, mask)
        return [alone(backend, sequence, *mask) for sequence in with_features(sequences_of(25, seed=1))]

    return texts


@MASKS
@pytest.mark.parametrize("layout", [packing.packed, packing.split, packing.padded])
def test_on_the_native_backend(checkpoint, texts_of, layout, mask):
    sequences = with_features(sequences_of(25, seed=1))
    schedule = Schedule(native_backend(checkpoint, layout, mask), sequences, 2, *mask)
    schedule.run()
    assert schedule.pauses and schedule.reruns and schedule.followed and bool(mask) == bool(schedule.taken_back)
    assert [sequence.generated for sequence in sequences] == texts_of(mask)
