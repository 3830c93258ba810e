"""Steps at fixed addresses give the right tokens in every interleaving of host and stream, with two steps in flight.

The host sets sequences up, writes a step and starts it, while the LazyStream of lazy_stream.py may still have the
uploads and launches of two earlier steps in its queue. The model is a number computed from all inputs of a row, so that
a wrong input of any kind gives a wrong token.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.slots import SlotState
from batch_manager.handover import (
    NO_UPDATES,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.device import running as device_module
from batch_manager.runtime.device.running import Readbacks, Uploads
from batch_manager.runtime.forms.fixed.inputs import FixedInputs
from batch_manager.runtime.forms.fixed.launches import Launches
from batch_manager.runtime.forms.fixed.shapes import captured_shapes, largest_shapes
from batch_manager.runtime.forms.form import traits_of
from batch_manager.runtime.forms.graph.form import GraphForm
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels.context_work_list import ContextTileWork, MostContextTileWork
from batch_manager.triton_kernels.sample_scratch import BUCKETS

from .lazy_stream import lazily

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")    # the name of another device; the tensors are on the CPU
SLOTS, VOCAB, SIZE, MAX_BLOCKS, MIXED = 4, 997, 4, 100, (8, 64)
SAMPLED = SamplingConfig(temperature=0.9, top_k=3, random_seed=2)


class Attention:
    """A BindableAttention that keeps what it is bound to, for the Model."""

    windows, dispatch = (None,), "torch"

    def plan_generation(self, kv_lengths):
        rows = np.arange(len(kv_lengths), dtype=np.int32)
        return {None: (np.stack([rows, kv_lengths, 3 * kv_lengths, 0 * rows], 1), np.zeros(len(rows) + 1, np.int32))}

    def most_parts(self, num_rows, max_blocks):
        return num_rows

    def plan_contexts(self, query_lengths, kv_lengths):
        count, no_rows = len(kv_lengths), np.zeros(0, np.int32)
        work = np.stack([np.arange(count), query_lengths + kv_lengths, *np.zeros((3, count))], 1).astype(np.int32)
        return {None: ContextTileWork(work, np.zeros(1, np.int32), no_rows)}

    def most_context_work(self, num_tokens, num_contexts, max_blocks, may_split):
        return MostContextTileWork(rows=num_contexts, split=0)

    def bind(self, generation, contexts):
        self.generation, self.contexts = generation, contexts


class Model:
    """A model whose logits are largest at a token computed from all inputs of the row."""

    def embed(self, tokens):
        return tokens

    def forward(self, tokens, positions, attention):
        """Return a number [t, 1] for each token."""
        given, contexts = attention.generation, attention.contexts
        parts = [self._code(given) + given.work[None][0][:, 1:].sum(1)]
        if contexts is not None:
            starts, count = contexts.query_starts.long(), len(positions) - len(parts[0])
            code = self._code(contexts) + 5 * contexts.work[None][0][:, 1]
            row = torch.bucketize(torch.arange(count), starts[1:], right=True).clamp_(max=len(code) - 1)
            parts.append(code[row] + 11 * contexts.pool_slots + contexts.positions)
        return (torch.cat(parts) + 7 * tokens + 3 * positions).double()[:, None]

    def _code(self, given):
        """Return a number [n] computed from the blocks and lengths of n sequences."""
        tables, lengths = given.block_tables[given.table_rows.long()].long(), given.kv_lengths.long()
        is_seen = torch.arange(MAX_BLOCKS) < -(-lengths // SIZE)[:, None]
        return (tables * is_seen * (1 + torch.arange(MAX_BLOCKS))).sum(1) + 13 * lengths

    def logits(self, hidden):
        logits, best = torch.zeros(len(hidden), VOCAB), hidden[:, 0].long() % VOCAB
        for rank in range(3):                            # the candidates of SAMPLED
            logits[torch.arange(len(hidden)), (best + 100 * rank) % VOCAB] = 9.0 - rank / 10
        return logits


def separate(tensor):
    """Return a copy that shares no memory with the host."""
    return tensor.clone()


class Engine:
    """A decoder and the form `graph` on a stream: replaying a step queues its launches.

    choose   choose(n) returns how many of the n queued actions run before the host writes the next upload
    """

    def __init__(self, stream, choose):
        self.stream = stream
        self.uploads, attention = Uploads(CPU), Attention()
        self.tables = BlockTables(SLOTS, MAX_BLOCKS, copied=(SLOTS, MAX_BLOCKS))
        self.decoder = GptDecoder(SlotState(SLOTS + 1, CPU, self.uploads.send))
        self.parts = SimpleNamespace(
            device=CPU, uploads=self.uploads, readbacks=Readbacks(ELSEWHERE), tables=self.tables,
            slots=self.decoder.state, decoder=self.decoder, attention=attention, num_slots=SLOTS, tokens_per_block=SIZE,
            adapters=None)
        inputs = FixedInputs(self.parts, largest_shapes(SLOTS, {MIXED}))
        launches = Launches(self.parts, inputs, Model(), None)
        self.form = GraphForm(self.parts, inputs, {
            shape: lambda shape=shape: stream.give(lambda: launches.launch(shape))
            for shape in captured_shapes(SLOTS, {MIXED}, inputs.may_split)})
        self._pretend_to_be_on_a_gpu(choose)

    def _pretend_to_be_on_a_gpu(self, choose):
        state, free_buffer = self.decoder.state, self.uploads._free_buffer
        for plane in {id(plane): plane for plane, *_ in state._columns.values()}.values():
            plane.tensor = separate(plane.tensor)
        state.device = SimpleNamespace(type="cuda")
        self.decoder.plain_counts = lambda rows: torch.empty((rows, BUCKETS), dtype=torch.int32)
        self.uploads._shares_memory = False

        def chosen(num_bytes):
            self.stream.run(choose(len(self.stream.queue)))
            self.num_uploads += 1
            return free_buffer(num_bytes)

        self.uploads._free_buffer, self.num_uploads = chosen, 0

    def start(self, batch):
        """Do what NativeBackend.start does for a step."""
        before, waits = self.num_uploads, self.stream.waits
        self.tables.update(batch)
        if batch.context:
            self.decoder.set_up((work.slot, work.setup) for work in batch.context)
        traits = traits_of(batch, self.parts.slots)
        assert not (traits & ~self.form.serves or self.form.misfit(batch))
        step = self.form.start(batch, traits)
        assert self.stream.waits == waits, "the host waited for the stream"
        return step, self.num_uploads - before


def updates(slot, first, count, seed):
    blocks = (37 * np.arange(count) + 101 * seed) % 1000
    return BlockTableUpdates(np.full(count, slot, np.int32), np.arange(first, first + count, dtype=np.int32),
                             blocks.astype(np.int32))


def joined(*parts):
    return BlockTableUpdates(*(np.concatenate([getattr(part, name) for part in parts])
                               for name in ("slots", "indices", "block_ids")))


def prompt(slot, length, **setup):
    tokens = np.arange(slot, slot + length, dtype=np.int32)
    return ContextWork(slot, tokens, 0, True, SlotSetup(prompt_length=length, **setup).continuing(tokens))


def generating(*rows):
    return GenerationWork(*np.array(rows, np.int32).reshape(-1, 2).T)


def batches():
    """Return the batches of eight steps.

    A step with contexts has three uploads: the setups, the changes of block tables that do not fit into the step's own
    buffer, and this buffer. A step without contexts has one. Slot 3 gets a second sequence while a step of its first
    sequence may still be on the stream. The changes for this slot are among those that do not fit.
    """
    return [
        ScheduledBatch(0, context=(prompt(0, 5), prompt(3, 7, sampling=SAMPLED)), block_table_updates=joined(
            updates(0, 0, MAX_BLOCKS, 1), updates(3, 0, MAX_BLOCKS, 2))),
        ScheduledBatch(1, generation=generating((0, 5), (3, 7))),
        ScheduledBatch(2, generation=generating((3, 8), (0, 6)), block_table_updates=updates(0, 1, 2, 3)),
        ScheduledBatch(3, context=(prompt(3, 9), prompt(2, 3, return_log_probs=True)), generation=generating((0, 7)),
                       block_table_updates=joined(updates(3, 0, MAX_BLOCKS, 4), updates(2, 0, MAX_BLOCKS, 5))),
        ScheduledBatch(4, generation=generating((0, 8), (2, 3), (3, 9))),
        ScheduledBatch(5, context=(prompt(1, 4, sampling=SAMPLED),), generation=generating((2, 4), (3, 10)),
                       block_table_updates=updates(1, 0, MAX_BLOCKS, 6)),
        ScheduledBatch(6, generation=generating((1, 4), (3, 11)), block_table_updates=updates(3, 2, 2, 7)),
        ScheduledBatch(7, generation=generating((1, 5)), block_table_updates=NO_UPDATES),
    ]


def run(monkeypatch, choose, in_flight=2):
    """Run the steps of `batches`, with up to `in_flight` of them started before the oldest is read.

    Returns (slots, tokens, log-probs) of each step, and the number of uploads of each.
    """
    outputs, started, uploads = [], [], []
    with lazily(monkeypatch) as stream, torch.inference_mode():
        engine = Engine(stream, choose)
        for batch in batches():
            step, count = engine.start(batch)
            uploads.append(count)
            started.append(step)
            if len(started) == in_flight:
                outputs.append(started.pop(0).finish())
        outputs += [step.finish() for step in started]
    assert not any(output.failures for output in outputs)
    return [(output.slots.tolist(), output.tokens.tolist(), None if output.log_probs is None
             else output.log_probs.tolist()) for output in outputs], uploads


@pytest.fixture(scope="module")
def expected():
    """Return the outputs of a stream that runs each action before the host goes on."""
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, lambda queued: queued, in_flight=1)


def test_each_step_has_tokens_of_its_own_and_one_or_three_uploads(expected):
    outputs, uploads = expected
    tokens = [token for _, tokens, _ in outputs for token in tokens]
    assert len(tokens) == 18 and len(set(tokens)) >= 16
    assert [slots for slots, _, log_probs in outputs if log_probs is not None] == [[3, 2, 0], [0, 2, 3], [1, 2, 3]]
    assert uploads == [3, 1, 1, 3, 1, 3, 1, 1]


@pytest.mark.parametrize("num_buffers", [1, 2, 8])
def test_a_stream_that_is_as_late_as_it_can_be_gives_the_same_tokens(monkeypatch, expected, num_buffers):
    monkeypatch.setattr(device_module, "UPLOAD_BUFFERS", num_buffers)
    for in_flight in (1, 2):
        assert run(monkeypatch, lambda queued: 0, in_flight) == expected


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_that_is_late_at_random_gives_the_same_tokens(monkeypatch, expected, seed):
    draw = np.random.default_rng(seed)
    monkeypatch.setattr(device_module, "UPLOAD_BUFFERS", 1 + seed % 4)
    assert run(monkeypatch, lambda queued: int(draw.integers(queued + 1))) == expected


def reused_buffers(patch):
    patch.setattr(device_module, "UPLOAD_BUFFERS", 1)
    patch.setattr("tests.runtime.lazy_stream.Event.query", lambda event: True)


def results_in_one_buffer(patch):
    def start(readbacks, *arguments, right=Readbacks.start, **options):
        readback = right(readbacks, *arguments, **options)
        readbacks.free(readback._buffer)                # before the host has read it
        return readback

    patch.setattr(Readbacks, "start", start)


def results_that_are_not_copied(patch):
    patch.setattr(torch.Tensor, "clone", lambda tensor: tensor)


def shared_staging(patch):
    """Patch uploads so that they read the arrays when the stream runs, and not when the host sends them."""
    def into(uploads, target, array):
        uploads._free_buffer(array.nbytes)
        target.copy_(torch.from_numpy(array), non_blocking=True)

    patch.setattr(Uploads, "into", into)


def shared_setups(patch):
    """Patch the engine so that a new setup changes the parameters of the steps in flight."""
    patch.setattr("tests.runtime.test_lazy_fixed_steps.separate", lambda tensor: tensor)


def changes_at_once(patch):
    """Patch steps so that the changes of block tables that do not fit into a step's buffer run before earlier steps."""
    def index_copy_(tensor, dimension, entries, blocks):
        tensor[entries] = blocks

    def write(inputs, *arguments, right=FixedInputs.write):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "index_copy_", index_copy_)
            inner.setattr(Uploads, "send", lambda uploads, arrays: [torch.from_numpy(array) for array in arrays])
            return right(inputs, *arguments)

    patch.setattr(FixedInputs, "write", write)


@pytest.mark.parametrize("fault", [reused_buffers, results_in_one_buffer, results_that_are_not_copied, shared_staging,
                                   shared_setups, changes_at_once])
def test_a_race_would_be_seen(monkeypatch, expected, fault):
    fault(monkeypatch)
    try:
        outputs, _ = run(monkeypatch, lambda queued: 0)
    except (IndexError, AssertionError):                # a wrong index may also be outside, a wrong result a failure
        return
    assert outputs != expected[0]
