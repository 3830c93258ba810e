"""Runs steps at fixed addresses on interpreted kernels, records their launches, and compares a replay with a new run.

    TRITON_INTERPRET=1 python -m tests.runtime.recorded_steps FOLDER      one line of JSON for each finding

A *plain* step samples with temperature, top-k, top-p and min-p only; see runtime/forms/fixed/inputs.py. FOLDER is the
folder for checkpoints of tests/integration/engine_modes.py. test_recorded_steps.py runs this program.
"""

import gc
import json
import sys
from collections import Counter
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from batch_manager import KvCacheConfig, PeftCacheConfig, TrtGptModelOptionalParams
from batch_manager.attention import triton_paged
from batch_manager.errors import ConfigError
from batch_manager.handover import (
    AdapterLoad,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.layers.recording import record_embedding
from batch_manager.runtime import build_backend, packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.forms import table
from batch_manager.runtime.forms.fixed import fused
from batch_manager.runtime.forms.fixed.form import read_result
from batch_manager.runtime.forms.fixed.launches import Launches
from batch_manager.runtime.forms.fixed.shapes import MOST_CONTEXTS, Shape, captured_shapes, graph_rows
from batch_manager.runtime.forms.form import traits_of
from batch_manager.runtime.forms.graph.form import GraphForm
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels import context_work_list
from tests.deterministic.differential import CONFIGS, make_checkpoint
from tests.harness.adapters import random_content
from tests.integration import engine_modes
from tests.runtime.capture_recorder import Recorder, ReplayedGraph

SLOTS, BLOCK, BLOCKS = 6, 16, 48
MIXED, SPLIT_MIXED = (Shape(8, is_split, True, 64, MOST_CONTEXTS) for is_split in (False, True))
SHORT, LONG = (1, 40), (90, 127)                  # lengths that attention computes in one part, and in several
context_work_list.MIN_KEYS_PER_PART = 16          # then attention splits contexts of 32 tokens
triton_paged.FIXED_PART_KEYS = 32                 # then sequences of a LONG length are split, and none of a SHORT one
LLAMA_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
              "vocab_size": engine_modes.VOCAB, "max_position_embeddings": 128, "num_hidden_layers": 1}
MANY = 72
SAMPLED = SlotSetup(SamplingConfig(temperature=0.9, top_k=20, top_p=0.9, random_seed=3))


def random_batch(draw, num_rows, is_split, contexts=()):
    """Return a batch of sequences in random slots, with random lengths and block tables.

    num_rows   number of generation rows
    is_split   whether one of them is so long that attention computes it in several parts
    contexts   (number of tokens, whether the chunk is the last of the prompt) of each context
    """
    slots, work = draw.permutation(SLOTS).astype(np.int32), []
    lengths = draw.integers(*SHORT, num_rows).astype(np.int32)
    if is_split:
        lengths[draw.integers(num_rows)] = draw.integers(*LONG)
    for slot, (num_tokens, is_last) in zip(slots[num_rows:].tolist(), contexts):
        tokens = draw.integers(0, engine_modes.VOCAB, num_tokens).astype(np.int32)
        work.append(ContextWork(slot, tokens, int(draw.integers(30)), is_last))
    rows, indices = np.divmod(np.arange(SLOTS * 8, dtype=np.int32), np.int32(8))
    return ScheduledBatch(
        0, context=tuple(work), generation=GenerationWork(slots[:num_rows], lengths),
        block_table_updates=BlockTableUpdates(rows, indices, draw.permutation(BLOCKS).astype(np.int32)))


class Steps:
    """The steps of an engine, padded to the shapes of graphs. What would be a replay is launched within a Recorder.

    launches   what is launched
    """

    def __init__(self, checkpoint, dtype="float32", num_slots=SLOTS, num_blocks=BLOCKS, adapters=None,
                 deterministic=False):
        params = TrtGptModelOptionalParams(
            device="cpu", dtype=dtype, num_threads=1, peft_cache_config=adapters, deterministic=deterministic,
            kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK, max_tokens=BLOCK * num_blocks))
        with mock.patch.object(table, "make_graph", lambda *given: setattr(self, "given", given)):
            self.backend = build_native_backend(checkpoint, params, layout=packing.packed, num_slots=num_slots,
                                                graph=ReplayedGraph)            # only `replays` captures graphs
        self.parts, self.inputs, self.launches, _, self.sizes, _ = self.given
        shapes = captured_shapes(num_slots, self.sizes, self.inputs.may_split, adapters is not None)
        self.form = GraphForm(self.parts, self.inputs, {shape: partial(self._record, shape) for shape in shapes})

    def _record(self, shape):
        with Recorder() as recorder:
            self.launches.launch(shape)
        self._recorded = shape, recorder

    def record(self, batch):
        """Run the batch. Return (shape of the step, recorder, the step's tokens, log-probs or None, failures)."""
        with torch.inference_mode():
            self.parts.tables.update(batch)
            traits = traits_of(batch, self.parts.slots)
            assert not (traits & ~self.form.serves or self.form.misfit(batch))
            step = self.form.start(batch, traits)
        return *self._recorded, values_of(step)

    def read(self, batch, shape):
        """Return what a step of the batch has left in the memory of the results."""
        return values_of(read_result(self.parts, self.inputs, batch, shape, traits_of(batch, self.parts.slots)))

    def set_up(self, samples, **greedy):
        """Set up sequences in all slots: sampled, or greedy with the fields `greedy` of SlotSetup."""
        with torch.inference_mode():
            self.parts.decoder.set_up((slot, SAMPLED if samples else SlotSetup(**greedy)) for slot in range(SLOTS))

    def without_fusion(self):
        model = self.launches._model
        return Launches(self.parts, self.inputs, model, record_embedding(model.embed))

    def keep_logits(self):
        """Return a list to which each step appends its logits."""
        logits, sample = [], self.parts.decoder.sample_plain
        self.parts.decoder.sample_plain = lambda given, *more: logits.append(given) or sample(given, *more)
        return logits


def values_of(step):
    found = step.finish()
    return found.tokens.tolist(), None if found.log_probs is None else found.log_probs.tolist(), found.failures


def recordings(steps):
    """Yield a finding for each shape, from two batches of this shape, the second of which has more padding.

    The finding has the differences between the launches of the batches, and the operations that a capture refuses. It
    also says whether replaying the first batch's launches on the second batch's inputs gives the second's results.
    """
    draw = np.random.default_rng(5)
    for samples in (False, True):
        steps.set_up(samples)
        for rows, is_split in product(graph_rows(SLOTS)[:-1:2] if samples else graph_rows(SLOTS), (False, True)):
            yield recording(steps, Shape(rows, is_split, samples),
                            *(random_batch(draw, count, is_split) for count in (min(rows, SLOTS), rows // 2 + 1)))
    yield recording(steps, MIXED, random_batch(draw, 3, False, [(2, True), (1, True), (2, False)]),
                    random_batch(draw, 1, False, [(2, True)]))
    # Keys of generating sequences and of contexts are split, then keys of contexts only.
    yield recording(steps, SPLIT_MIXED, random_batch(draw, 3, True, [(40, True), (1, True), (17, False)]),
                    random_batch(draw, 1, False, [(40, True)]))


def recording(steps, expected_shape, first, second):
    shape, one, _ = steps.record(first)
    assert shape == expected_shape, shape
    has_split_contexts = shape.contexts > 0 and bool(steps.inputs.of(shape).arrays["context_starts_0"][-1])
    has_split_rows = bool(steps.inputs.of(shape).arrays["starts_0"][-1])
    shape, other, expected = steps.record(second)
    assert shape == expected_shape, shape
    with torch.inference_mode():
        steps.inputs.of(shape).read_back.fill_(-7)
    one.replay()
    found = steps.read(second, shape)
    return {"finding": "recording", "shape": list(shape), "launches": [len(one.entries), len(other.entries)],
            "merges": list(one.launches).count("_merge_kernel"), "has_split_contexts": has_split_contexts,
            "has_split_rows": has_split_rows,
            "fused": Counter(one.launches),
            "different": [pair for pair in zip(one.entries, other.entries) if pair[0] != pair[1]][:2],
            "refusals": one.refusals + other.refusals, "replayed": found == expected, "sampled": found[0]}


def merged_in_decode(folder):
    """Yield findings of a split step whose decode kernel combines the parts: the recording, and what the counters hold.

    The two recordings, with a kernel that combines the parts and without, are of the same batches.
    """
    for merges in (False, True):
        triton_paged.MERGES_IN_DECODE = merges
        steps = Steps(engine_modes.checkpoint(folder))
        steps.set_up(False)
        draw = np.random.default_rng(6)
        steps.record(random_batch(draw, 4, True))                # makes the counters, as before a capture
        found = recording(steps, Shape(4, True, False), *(
            random_batch(draw, count, True) for count in (4, 3)))
        yield {**found, "finding": "merged in decode", "counters": [
            int(counters.abs().sum()) for counters in steps.parts.attention._counters]}
    triton_paged.MERGES_IN_DECODE = False


def adapted(folder):
    """Yield findings of steps in which sequences have two adapters, or none: generation rows, and with contexts."""
    steps = Steps(engine_modes.checkpoint(folder), adapters=PeftCacheConfig(max_adapter_size=16))
    port, all_pages = steps.parts.adapters, [(0, 1), (5, 3, 4)]
    with torch.inference_mode():
        for number, pages in enumerate(all_pages):
            port.pool.load(AdapterLoad(number, pages, random_content(port.modules, number, len(pages))))
        steps.parts.decoder.set_up((slot, SlotSetup(adapter_pages=([*all_pages, *all_pages, all_pages[0], None])[slot]))
                                   for slot in range(SLOTS))
    draw = np.random.default_rng(7)
    yield {**recording(steps, Shape(4, False, True, adapts=True), random_batch(draw, 4, False),
                       random_batch(draw, 3, False)), "finding": "adapted"}
    yield {**recording(steps, SPLIT_MIXED._replace(adapts=True), random_batch(
        draw, 3, False, [(40, True), (1, True)]), random_batch(draw, 1, False, [(40, True)])), "finding": "adapted"}


def counted(folder):
    """Yield the launches of a step at fixed addresses of two float16 models, with one and with two layers.

    There is a finding for a greedy step and one for a sampled step.
    """
    made = [Steps(engine_modes.checkpoint(folder, num_layers), "float16") for num_layers in (1, 2)]
    for samples in (False, True):
        found = []
        for steps in made:
            steps.set_up(samples)
            batch = random_batch(np.random.default_rng(5), 1, is_split=False)
            found.append(list(steps.record(batch)[1].launches))
        yield {"finding": "count", "samples": samples, "launches": found}


def planted(steps):
    """Yield the recorder's findings for wrong steps: two take a value from the host, and one waits for the device."""
    def rows_of_the_host(given):
        given.generation.table_rows.copy_(torch.from_numpy(given.arrays["table_rows"].copy()))

    def length_as_a_number(given):
        given.generation.kv_lengths[:1].fill_(int(given.arrays["kv_lengths"][0]))

    def waits(given):
        given.tensors["slots"][0].item()

    right = Launches.launch
    steps.set_up(False, return_log_probs=True)     # tokens alone can be equal by chance
    for plant in (rows_of_the_host, length_as_a_number, waits):
        def launch(launches, shape, plant=plant):
            plant(steps.inputs.of(shape))
            right(launches, shape)

        Launches.launch = launch
        draw = np.random.default_rng(5)
        yield {**recording(steps, Shape(4, False, False), random_batch(draw, 4, False),
                           random_batch(draw, 3, False)), "finding": plant.__name__}
    Launches.launch = right


def launches(folder):
    """Yield the launches of one Llama layer, and the launches outside of the layers, in a step of four rows.

    Launches are counted without fusion ("separate"), with it ("fused"), and with the option `deterministic`. The
    function also yields the largest difference between the logits of the first two, and of the last two.
    """
    found = []
    for num_layers in (1, 2):
        CONFIGS["llama"] |= engine_modes.SMALL | {"num_hidden_layers": num_layers}
        parent = Path(folder) / f"{num_layers} layers"
        parent.mkdir(exist_ok=True)
        checkpoint = make_checkpoint("llama", parent)
        steps, deterministic = Steps(checkpoint), Steps(checkpoint, deterministic=True)
        fused, separate, alike = steps.launches, steps.without_fusion(), deterministic.launches
        logits, logits_alike = steps.keep_logits(), deterministic.keep_logits()
        found.append({})
        for is_split in (False, True):
            batch = random_batch(np.random.default_rng(3), 4, is_split)
            for label, made, runs in (("deterministic", deterministic, alike), ("fused", steps, fused),
                                      ("separate", steps, separate)):
                made.launches = runs
                recorder = made.record(batch)[1]
                assert recorder.refusals == []
                found[-1][label, is_split] = Counter(recorder.launches)
            yield {"finding": "logits", "scale": logits[-1].abs().max().item(),
                   "difference": max((logits[-2] - logits[-1]).abs().max().item(),
                                     (logits_alike[-1] - logits[-1]).abs().max().item())}
    for label, is_split in found[0]:
        one, two = (counts[label, is_split] for counts in found)
        yield {"finding": "launches", "label": label, "is_split": is_split, "layer": dict(two - one),
               "around": dict(one - (two - one))}


def many_rows(folder):
    """Yield a finding of a step of MANY rows, in a model of one layer with the sizes of a Llama of 135 million weights.

    The rows are two tiles, the second not full. The finding is a recording of the step, the launches of the step, fused
    and separate, and the difference of the logits, in float16.
    """
    CONFIGS["llama"] |= LLAMA_135M
    parent = Path(folder) / "135M"
    parent.mkdir()
    steps = Steps(make_checkpoint("llama", parent), "float16", MANY, MANY)
    slots, draw = np.arange(MANY, dtype=np.int32), np.random.default_rng(8)
    first, second = (ScheduledBatch(
        0, block_table_updates=BlockTableUpdates(slots, 0 * slots, slots), generation=GenerationWork(
            slots[:count], draw.integers(1, BLOCK, count).astype(np.int32))) for count in (MANY, MANY - 5))
    logits = steps.keep_logits()
    found = recording(steps, Shape(MANY, False, False), first, second)
    steps.launches = steps.without_fusion()
    separate = Counter(steps.record(second)[1].launches)
    # The replay has overwritten the first logits. The last rows are padding.
    _, fused_logits, separate_logits = (rows[: MANY - 5].float() for rows in logits)
    yield {**found, "finding": "many rows", "separate": separate, "scale": separate_logits.abs().max().item(),
           "difference": (fused_logits - separate_logits).abs().max().item()}


class SpoiltGraph(ReplayedGraph):
    """Changes results of a replay by `spoils(shape, results)`. If that is None, the second capture raises."""

    spoils, inputs = None, None

    def capture(self, function):
        if SpoiltGraph.spoils is None and self.memory_of:
            raise RuntimeError("operation not permitted when stream is capturing")
        super().capture(function)

    def replay(self):
        super().replay()
        if SpoiltGraph.spoils is not None:
            SpoiltGraph.spoils(self._shape, SpoiltGraph.inputs.of(self._shape).results)


def token_of_the_last_row(shape, results):
    if not shape.contexts:
        results[0, min(shape.rows, SLOTS) - 1] += 1


def log_prob_of_a_split_step(shape, results):
    if shape.is_split and not shape.contexts:
        results[3, 0].view(torch.float32).add_(0.01)


def token_of_a_context(shape, results):
    if shape.contexts:
        results[0, shape.rows] += 1


def wrong_replays(folder):
    """Yield what a backend finds in graphs of which one is wrong in one kind of step, and does if there are none."""
    steps, levels = Steps(engine_modes.checkpoint(folder), num_slots=2), []
    table.log.log = lambda level, text, *values: levels.append([level, text % values])
    SpoiltGraph.inputs, sizes = steps.inputs, frozenset(sorted(steps.sizes)[:1])

    def made(**options):
        absent, params = {}, TrtGptModelOptionalParams(**options)
        form = table.attempt(absent, None, params, "graph", lambda: table.make_graph(
            *steps.given[:4], sizes, SpoiltGraph))
        return {"has_graphs": form is not None, "absent": absent, "pool_is_zero": not steps.parts.pool.any().item()}

    SpoiltGraph.spoils = staticmethod(lambda *_: None)
    with torch.inference_mode(), mock.patch.object(table, "capture", cache(table.capture)):     # captured once
        yield {"finding": "wrong replay", "name": "none", **made()}
        for spoils in (token_of_the_last_row, log_prob_of_a_split_step, token_of_a_context):
            SpoiltGraph.spoils = staticmethod(spoils)
            yield {"finding": "wrong replay", "name": spoils.__name__, **made()}
    SpoiltGraph.spoils = None
    with torch.inference_mode():
        yield {"finding": "wrong replay", "name": "raises", **made(), "levels": levels}
        try:
            made(cuda_graphs=True)
        except ConfigError as error:
            yield {"finding": "wrong replay", "name": "must", "error": str(error)}
    ReplayedGraph.captured.clear()
    ReplayedGraph.replayed.clear()


def replays(folder):
    """Yield the answers of an engine that replays graphs. `wrong_replays` has made its comparison with launches."""
    table.difference_of_graphs = lambda *_, **__: None
    build_backend.build_native_backend = partial(build_native_backend, graph=ReplayedGraph)
    yield {"finding": "replay", **engine_modes.run(folder, "plain_rows"), "captured": len(ReplayedGraph.captured),
           "replayed": Counter("contexts" if shape.contexts else "generation" for shape in ReplayedGraph.replayed),
           "split": Counter(shape.is_split for shape in ReplayedGraph.replayed if shape.contexts)}


if __name__ == "__main__":
    # The warm-up and the comparison of fused products take most of the time, and other tests cover them.
    table.warm_up = lambda *_: None
    fused.compared_tokens = lambda *_: ()
    gc.freeze()                                     # a Recorder visits the objects of the collector
    made = Steps(engine_modes.checkpoint(sys.argv[1]))
    for finding in chain(recordings(made), planted(made), adapted(sys.argv[1]),
                         wrong_replays(sys.argv[1]), replays(sys.argv[1]), launches(sys.argv[1]),
                         counted(sys.argv[1]), merged_in_decode(sys.argv[1]),
                         many_rows(sys.argv[1])):
        print(json.dumps(finding), flush=True)
