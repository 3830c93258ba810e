"""In no step of any feature does the host wait for a copy to the device.

The tests run a context step and generation steps in which one sequence has the feature and another has none, with
meta_engine.py. They find each copy from the host that is no upload. Each feature of SlotSetup has a row in FEATURES.
On a GPU, torch itself looks for waits while the decoder samples.
"""

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.logits_return import context_logits
from batch_manager.decoding.slots import SamplingRows, SlotState
from batch_manager.extras.guided_decoding import forbid
from batch_manager.handover import (
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    LogitsPostProcessor,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.runtime.device.running import Uploads
from batch_manager.sampling_config import SamplingConfig
from tests.harness.gpu import GPU, needs_gpu

from .meta_engine import HIDDEN, META, SLOTS, VOCAB, WIDTH, Engine, copies_from_the_host

PROMPT = np.arange(5, dtype=np.int32)
MOST_SENDS = 4                     # uploads of a generation step

PROCESSORS = [LogitsPostProcessor(0, lambda _, logits, __: logits.clone(), lambda: [[1]]),
              LogitsPostProcessor(0, lambda *_: None, lambda: [[1]], is_batched=True)]
FEATURES = {
    "nothing": {},
    "sampling": {"sampling": SamplingConfig(top_k=4, top_p=0.5, random_seed=1), "return_log_probs": True},
    "min_length": {"sampling": SamplingConfig(min_length=9), "end_id": 3},
    "min_length and more end ids": {"sampling": SamplingConfig(min_length=9), "end_id": 3, "more_end_ids": (4, 5)},
    "more end ids": {"end_id": 3, "more_end_ids": (4, 5)},
    "embedding_bias": {"embedding_bias": np.ones(VOCAB, np.float32)},
    "penalties": {"sampling": SamplingConfig(repetition_penalty=1.5, frequency_penalty=0.5)},
    "repeated n-grams": {"sampling": SamplingConfig(no_repeat_ngram_size=2)},
    "bad words": {"bad_words": ((1, 2), (3,))},
    "stop words": {"stop_words": ((1, 2), (3,))},
    "top-p decay": {"sampling": SamplingConfig(top_p=0.5, top_p_decay=0.5)},
    "log-probs": {"return_log_probs": True},
    "raw log-probs": {"return_log_probs": True, "raw_log_probs": True},
    "top log-probs": {"top_log_probs": 3},
    "raw top log-probs": {"top_log_probs": 3, "raw_log_probs": True, "return_log_probs": True},
    "generation logits": {"return_generation_logits": True},
    "post-processor": {"logits_post_processor": PROCESSORS[0]},
    "batched post-processor": {"logits_post_processor": PROCESSORS[1]},
}
DEVICES = ["cpu", pytest.param(GPU, marks=[pytest.mark.gpu, needs_gpu], id="gpu")]
BEAMS = {
    "beams": {},
    "beams with stages": {"sampling": SamplingConfig(beam_width=WIDTH, min_length=9), "end_id": 3},
    "beams with a history": {"sampling": SamplingConfig(beam_width=WIDTH, repetition_penalty=1.5)},
    "beams with a bias": {"embedding_bias": np.ones(VOCAB, np.float32)},
    "beams with a post-processor": {"logits_post_processor": PROCESSORS[1]},
}


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


def prompts(setups, max_beam_width=1):
    """Return a batch with the prompt of a sequence for each setup, in slots 0, 1, ..."""
    rows, indices = np.divmod(np.arange(len(setups) * max_beam_width * 2, dtype=np.int32), np.int32(2))
    return ScheduledBatch(
        0, context=tuple(ContextWork(slot, PROMPT, 0, True, setup.continuing(PROMPT))
                         for slot, setup in enumerate(setups)),
        block_table_updates=BlockTableUpdates(rows, indices, rows), max_beam_width=max_beam_width)


def next_tokens(iteration, slots, beam_width=1):
    """Return a batch in which the sequences in `slots` generate one more token."""
    lengths = np.full(len(slots), len(PROMPT) + iteration - 1, np.int32)
    return ScheduledBatch(iteration, generation=GenerationWork(np.array(slots, np.int32), lengths, beam_width),
                          max_beam_width=beam_width)


def setup_of(given):
    return SlotSetup(**{"prompt_length": len(PROMPT), "max_new_tokens": 20, **given})


@pytest.mark.parametrize("feature", FEATURES)
def test_the_host_waits_for_no_copy_in_a_step_with(engine, feature):
    plain, given = setup_of({}), setup_of(FEATURES[feature])
    assert engine.run(prompts([given, plain]))[1] == []
    sends = []
    for iteration, slots in ((1, [0, 1]), (2, [0])):
        count, others = engine.run(next_tokens(iteration, slots))
        assert others == []
        sends.append(count)
    assert max(sends) <= MOST_SENDS
    assert engine.run(prompts([given, given, plain, given]))[1] == []           # in the same slots and others
    assert engine.run(next_tokens(1, [0, 1, 2, 3])) == (sends[0], [])           # as many uploads as with two rows


@pytest.mark.parametrize("feature", BEAMS)
def test_the_host_waits_for_no_copy_in_a_step_with_beams(engine, feature):
    beams = {"sampling": SamplingConfig(beam_width=WIDTH)}
    setups = [setup_of({**beams, **BEAMS[feature]}), setup_of({}), setup_of(beams)]
    assert engine.run(prompts(setups, WIDTH))[1] == []
    for iteration in (1, 2, 3):
        advance(engine.sampled.beams)
        assert engine.run(next_tokens(iteration, [0, 2], WIDTH))[1] == []


def advance(beams):
    """Advance the searches of a step, as if each step sampled the tokens 10, 11, ... for the first beam."""
    tensors, count = beams.tensors, beams.tensors["beam_tokens"].shape
    beams.finish({"beam_log_probs": np.full(count, -1, np.float32), "beam_parents": np.zeros(count, np.int32),
                  "beam_tokens": np.broadcast_to(np.arange(10, 10 + count[1], dtype=np.int32), count),
                  "beam_finite": np.ones(len(tensors["beam_finite"]), bool)}, ())


def test_word_lists_that_move_to_a_larger_heap_are_sent_too(engine):
    long = setup_of({"stop_words": tuple((token, 1) for token in range(300))})
    assert engine.run(prompts([long]))[1] == []
    assert engine.run(prompts([long] * 4))[1] == []


def test_slots_are_added_without_a_copy(engine):
    every_feature = setup_of({"sampling": SamplingConfig(top_p=0.5, top_p_decay=0.5, min_length=9), "end_id": 3,
                              "more_end_ids": (4, 5), "stop_words": ((1, 2),)})
    assert engine.run(prompts([every_feature]))[1] == []
    capacity, slot = engine.decoder.state.capacity, SLOTS + 3
    with copies_from_the_host() as copies:
        engine.decoder.set_up([(slot, every_feature.continuing(PROMPT))])
    assert copies.found == [] and engine.decoder.state.capacity > max(slot, capacity)


def test_a_prompt_with_its_own_embeddings_is_sent(engine):
    batch = prompts([setup_of({})])
    work = ContextWork(0, np.array([VOCAB, 1, 2], np.int32), 0, True, setup_of({}).continuing([0, 1, 2]),
                       embeddings=np.zeros((1, HIDDEN), np.float32))
    assert engine.run(ScheduledBatch(0, context=(work,), block_table_updates=batch.block_table_updates))[1] == []


def test_the_masks_of_a_grammar_are_sent_from_pinned_memory(engine):
    with copies_from_the_host() as copies:
        forbid(torch.empty(2, 40, device=META), np.zeros((2, 2), np.int32))
    assert copies.found == []


def test_context_logits_are_the_one_result_that_the_host_waits_for():
    """`context_logits` copies from the device in pieces, because all its logits may be too large for the device."""
    with copies_from_the_host(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        context_logits(lambda hidden: torch.empty(len(hidden), VOCAB, device=META),
                       torch.empty(3, HIDDEN, device=META), VOCAB)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", FEATURES)
def test_torch_finds_no_wait_while_a_decoder_samples_with(feature, device):
    device, setups = torch.device(device), [setup_of(FEATURES[feature]), setup_of({})]
    uploads = Uploads(device)
    decoder = GptDecoder(SlotState(len(setups), device, uploads.send))

    def step(position):
        slots, positions = np.arange(2, dtype=np.int32), np.full(2, position, np.int32)
        rows = SamplingRows(slots, positions, *uploads.send([slots.astype(np.int64), positions.astype(np.int64)]))
        sampled = decoder.sample(torch.zeros(2, VOCAB, device=device), rows)
        decoder.keep(sampled)
        return sampled.tensors()

    def sequences():
        decoder.set_up((slot, setup.continuing(PROMPT)) for slot, setup in enumerate(setups))
        return [step(len(PROMPT)), step(len(PROMPT) + 1)]

    with torch.inference_mode():
        sequences()                                                 # compiles the kernels
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            found = sequences()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert all(tensors["finite"].all() for tensors in found)
