"""The native backend applies the logits post-processors and the prompt embedding tables of requests, on CPU and GPU."""

import numpy as np
import pytest
import torch

from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import (
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    LogitsPostProcessor,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.names import ErrorCode
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.sampling_config import SamplingConfig
from tests.harness.gpu import GPU, needs_gpu

VOCAB, HIDDEN, SIZE, PER_SEQUENCE = 160, 48, 16, 4
DEVICES = ["cpu", pytest.param(GPU, marks=[pytest.mark.gpu, needs_gpu], id="cuda")]
ASK = dict(return_log_probs=True, return_generation_logits=True)


@pytest.fixture(params=DEVICES)
def backend(checkpoint, request):
    kv = KvCacheConfig(tokens_per_block=SIZE, max_tokens=PER_SEQUENCE * 5 * SIZE)
    backend = build_native_backend(
        checkpoint[0], TrtGptModelOptionalParams(kv_cache_config=kv, device=request.param, dtype="float32"),
        layout=packing.packed, num_slots=5)
    yield backend
    backend.close()


def step(contexts=(), rows=()):
    """Return the ScheduledBatch of a step. A context with a setup gets new blocks.

    contexts   (slot, tokens, position of the first one, whether the chunk is the last, setup or None, embeddings)
    rows       (slot, KV length) of each generation row
    """
    works = tuple(ContextWork(slot, np.array(tokens, np.int32), start, last, setup, embeddings)
                  for slot, tokens, start, last, setup, embeddings in contexts)
    new = [(work.slot, index, work.slot * PER_SEQUENCE + index) for work in works if work.setup is not None
           for index in range(PER_SEQUENCE)]
    generation = GenerationWork(*np.array(rows, np.int32).reshape(-1, 2).T)
    return ScheduledBatch(0, context=works, generation=generation, block_table_updates=BlockTableUpdates(
        *np.array(new, np.int32).reshape(-1, 3).T))


def run(backend, contexts=(), rows=()):
    return backend.start(step(contexts, rows)).finish()


def logits_of(checkpoint, token_ids, table=None):
    """Return transformers' logits [tokens, vocab] after each token. Ids from VOCAB on are rows of `table`."""
    model, ids = checkpoint[1], torch.tensor(token_ids)
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(ids.clamp(max=VOCAB - 1))
        if table is not None:
            embeddings[ids >= VOCAB] = torch.from_numpy(table)[ids[ids >= VOCAB] - VOCAB]
        return model(inputs_embeds=embeddings[None]).logits[0].numpy()


def test_functions_get_logits_on_the_engines_device_and_what_they_return_is_sampled_from(checkpoint, backend):
    seen = []

    def keep_odd_tokens(request_id, logits, token_ids):
        seen.append((request_id, logits.device.type, tuple(logits.shape)))
        logits[..., ::2] = -torch.inf
        return logits

    def keep_the_first_ten(request_ids, logits, token_ids):
        seen.append((request_ids, logits.device.type, tuple(logits.shape)))
        logits[..., 10:] = -torch.inf

    one = LogitsPostProcessor(70, keep_odd_tokens, lambda: [[1]])
    batched = [LogitsPostProcessor(71 + i, keep_the_first_ten, lambda: [[1]], True) for i in range(2)]
    prompts = {0: [5, 6, 7], 1: [8, 9], 2: [3], 3: [4, 4, 4, 4]}
    setups = {slot: SlotSetup(logits_post_processor=given, **ASK) for slot, given in enumerate([one, None, *batched])}
    output = run(backend, [(slot, prompt, 0, True, setups[slot], None) for slot, prompt in prompts.items()])
    device = backend._device.type
    assert seen == [(70, device, (1, 1, VOCAB)), ([71, 72], device, (2, 1, 1, VOCAB))] and output.failures == {}
    for row, (slot, prompt) in enumerate(prompts.items()):
        logits = logits_of(checkpoint, prompt)[-1]
        atol = 1e-3 if device == "cuda" else 1e-4
        np.testing.assert_allclose(output.generation_logits[slot], logits[None], atol=atol)
        changed = logits.copy()
        if slot == 0:
            changed[::2] = -np.inf
        elif slot > 1:
            changed[10:] = -np.inf
        assert output.tokens[row] == changed.argmax()
        log_prob = torch.from_numpy(changed).log_softmax(0)[int(output.tokens[row])]
        assert abs(float(output.log_probs[row]) - float(log_prob)) < 1e-3


def test_a_function_that_raises_or_leaves_no_token_fails_its_slot_on_the_device_too(backend):
    def raises(request_id, logits, token_ids):
        raise RuntimeError

    def forbids_everything(request_id, logits, token_ids):
        return torch.full_like(logits, -torch.inf)

    held = [LogitsPostProcessor(slot, function, lambda: [[1]]) for slot, function in enumerate(
        [raises, forbids_everything, lambda i, x, t: x * float("nan"), lambda i, x, t: x + 1])]
    contexts = [(slot, [7, slot], 0, True, SlotSetup(logits_post_processor=held[slot]), None) for slot in range(4)]
    output = run(backend, contexts)
    assert {slot: failure.code.value for slot, failure in output.failures.items()} == {
        0: "MODEL_ERROR", 1: "NON_FINITE_LOGITS", 2: "NON_FINITE_LOGITS"}
    assert all("post-processor" in failure.message for failure in output.failures.values())


@pytest.mark.parametrize("width", [1, 2])
def test_who_left_no_token_is_named_the_function_or_the_bans_or_the_model(backend, width):
    everything = tuple((token,) for token in range(VOCAB))

    def forbids_everything(request_id, logits, token_ids):
        return torch.full_like(logits, -torch.inf)

    def forbids_but_one(request_id, logits, token_ids):
        logits[..., 1:] = -torch.inf
        return logits

    def held(slot, function):
        return LogitsPostProcessor(slot, function, lambda: [[1]])

    setups = [
        dict(bad_words=everything),
        dict(bad_words=everything, logits_post_processor=held(1, forbids_but_one)),
        dict(bad_words=everything[1:], logits_post_processor=held(2, forbids_everything)),
        dict(bad_words=everything[1:], logits_post_processor=held(3, forbids_but_one)),
        dict(bad_words=((0,),), logits_post_processor=held(4, forbids_but_one)),
        dict(logits_post_processor=held(5, forbids_everything)),
        dict(bad_words=everything[1:]),
    ]
    failures = {}
    for i, setup in enumerate(setups):                        # each with a sequence that has no options
        setup = SlotSetup(sampling=SamplingConfig(beam_width=width), max_new_tokens=3, **setup).continuing([7, i])
        output = run(backend, [(0, [7, i], 0, True, setup, None), (1, [8], 0, True, SlotSetup(), None)])
        assert output.failures.keys() <= {0}
        failures |= dict.fromkeys([i] * len(output.failures), output.failures.get(0))
    assert {failure.code for failure in failures.values()} == {ErrorCode.NON_FINITE_LOGITS}
    assert sorted(failures) == [0, 1, 2, 4, 5]
    for i, failure in failures.items():
        by_bans = f"of this request ban all {VOCAB:,} tokens" in failure.message
        by_function = "correct the function" in failure.message
        assert (by_bans, by_function) == ((True, False) if i in (0, 1, 4) else (False, True)), failure.message
        assert len(failure.message.split("; ")) == 3


def test_virtual_tokens_in_one_chunk_of_several_and_in_one_sequence_of_several(checkpoint, backend):
    random = np.random.default_rng(0)
    tables = [random.normal(size=(4, HIDDEN)).astype(np.float32) for _ in range(2)]
    long = [1, 2, 3, 4, 5, 6, 7, 8, VOCAB + 3, VOCAB, 9, 10]
    short = [VOCAB + 1, VOCAB + 1, 5]
    first = run(backend, [(0, long[:8], 0, False, SlotSetup(**ASK), None),
                          (1, [20, 21], 0, True, SlotSetup(**ASK), None)])
    second = run(backend, [(0, long[8:], 8, True, None, tables[0][[3, 0]]),
                           (2, short, 0, True, SlotSetup(**ASK), tables[1][[1, 1]])], [(1, 2)])
    tolerance = 1e-3 if backend._device.type == "cuda" else 1e-4
    np.testing.assert_allclose(first.generation_logits[1], logits_of(checkpoint, [20, 21])[-1:], atol=tolerance)
    np.testing.assert_allclose(second.generation_logits[0], logits_of(checkpoint, long, tables[0])[-1:], atol=tolerance)
    np.testing.assert_allclose(second.generation_logits[2], logits_of(checkpoint, short, tables[1])[-1:],
                               atol=tolerance)
    continued = [20, 21, int(first.tokens[0])]
    np.testing.assert_allclose(second.generation_logits[1], logits_of(checkpoint, continued)[-1:], atol=tolerance)


def test_the_parts_of_a_step_that_runs_again_have_their_own_functions_and_embeddings(backend):
    calls = []

    def note(request_id, logits, token_ids):
        calls.append(request_id)
        return logits

    held = [LogitsPostProcessor(slot, note, lambda: [[1]]) for slot in range(3)]
    tables = [np.full((1, HIDDEN), 0.1 * (slot + 1), np.float32) for slot in range(3)]
    batch = step([(slot, [VOCAB, 5 + slot], 0, True, SlotSetup(logits_post_processor=held[slot], **ASK), tables[slot])
                  for slot in range(3)])
    whole = backend.start(batch).finish()
    for start, stop in ((0, 1), (1, 3)):
        part = backend.start(batch.take(range(start, stop))).finish()
        assert part.tokens.tolist() == whole.tokens[start:stop].tolist()
        for slot in range(start, stop):
            np.testing.assert_allclose(part.generation_logits[slot], whole.generation_logits[slot], atol=1e-3)
    assert calls == [0, 1, 2, 0, 1, 2]
    assert not np.allclose(whole.generation_logits[0], whole.generation_logits[1], atol=1e-2)
