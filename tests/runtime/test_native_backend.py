import contextlib
import copy
import dataclasses
import weakref

import numpy as np
import pytest
import torch

from batch_manager.attention.torch_paged import TorchPagedAttention
from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.decoding.decoder import GptDecoder
from batch_manager.errors import ConfigError, InsufficientMemoryError, ModelLoadError
from batch_manager.handover import (
    END_ID,
    BlockClear,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.models.registry import find_model
from batch_manager.names import ErrorCode
from batch_manager.runtime import build_backend, memory_plan, native_backend, packing, warm_up
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.forms import table
from batch_manager.runtime.forms.fixed.shapes import MOST_CONTEXTS
from batch_manager.runtime.forms.graph.form import GraphForm
from batch_manager.sampling_config import SamplingConfig
from batch_manager.steps.output_check import StepOutputCheck
from batch_manager.triton_kernels.attention_scratch import attention_scratch_bytes
from batch_manager.triton_kernels.sample_scratch import scratch_bytes
from tests.harness.gpu import GPU, IS_REHEARSAL, in_torch, needs_gpu

VOCAB, SIZE, BLOCKS, PER_SEQUENCE = 160, 8, 40, 8
GREEDY = SlotSetup()
LAYOUTS = [packing.packed, packing.split, packing.padded]
GENERATED = 3 if IS_REHEARSAL else 8               # generation steps of the tests on a GPU


def params(**changes):
    kv = KvCacheConfig(tokens_per_block=SIZE, max_tokens=BLOCKS * SIZE)
    return TrtGptModelOptionalParams(**{"kv_cache_config": kv, "device": "cpu", **changes})


def build(checkpoint, *, layout=packing.packed, num_slots=5, **changes):
    return build_native_backend(checkpoint[0], params(**changes), layout=layout, num_slots=num_slots)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.__name__)
def backend(checkpoint, request):
    backend = build(checkpoint, layout=request.param)
    yield backend
    backend.close()


def prompts_of(*lengths):
    random = np.random.default_rng(3)
    return [random.integers(0, VOCAB, length).tolist() for length in lengths]


def reference(checkpoint, prompt, count):
    """Generate `count` greedy tokens after the prompt with transformers, without a KV cache.

    Returns (tokens, their log-probs, logits of the prompt and of all tokens but the last).
    """
    tokens, log_probs = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logits = checkpoint[1](torch.tensor([tokens])).logits[0]
            best = int(logits[-1].argmax())
            log_probs.append(float(logits[-1].log_softmax(-1)[best]))
            tokens.append(best)
    return tokens[len(prompt):], log_probs, logits


def blocks_of(slot, count=PER_SEQUENCE):
    """Return the block table of a slot. Tables of different slots are interleaved, and their blocks out of order."""
    return [(slot + 5 * ((3 * i + slot) % count)) for i in range(count)]


def updates(slots, count=PER_SEQUENCE):
    rows = [(slot, index, block) for slot in slots for index, block in enumerate(blocks_of(slot, count))]
    return BlockTableUpdates(*np.array(rows, np.int32).reshape(-1, 3).T)


def step(contexts=(), rows=(), blocks_per_sequence=PER_SEQUENCE):
    """Return the ScheduledBatch of a step. A context with a setup gets the blocks of its slot.

    contexts   (slot, tokens, position of the first one, whether the chunk is the last, setup or None) of each context
    rows       (slot, KV length) of each generation row
    """
    works = tuple(ContextWork(slot, np.array(tokens, np.int32), start, last, setup)
                  for slot, tokens, start, last, setup in contexts)
    generation = GenerationWork(np.array([slot for slot, _ in rows], np.int32),
                                np.array([length for _, length in rows], np.int32))
    return ScheduledBatch(iteration=0, context=works, generation=generation,
                          block_table_updates=updates([work.slot for work in works if work.setup is not None],
                                                     blocks_per_sequence))


def run(backend, contexts=(), rows=()):
    return backend.start(step(contexts, rows, PER_SEQUENCE * SIZE // backend.info.tokens_per_block)).finish()


class Driver:
    """Runs sequences on a backend as the engine's loop does, and collects their results."""

    def __init__(self, backend):
        self.backend, self.lengths, self.tokens, self.log_probs = backend, {}, {}, {}

    def run(self, contexts=(), generate=()):
        output = run(self.backend, contexts, [(slot, self.lengths[slot]) for slot in generate])
        self.take(contexts, generate, output)
        return output

    def take(self, contexts, generate, output):
        for slot, tokens, start, _, _ in contexts:
            self.lengths[slot] = start + len(tokens)
            if start == 0:
                self.tokens[slot], self.log_probs[slot] = [], []
        for slot in generate:
            self.lengths[slot] += 1
        assert output.failures == {}
        for row, slot in enumerate(output.slots.tolist()):
            self.tokens[slot].append(int(output.tokens[row]))
            if output.log_probs is not None:
                self.log_probs[slot].append(float(output.log_probs[row]))


def alone(backend, prompt, count, setup=GREEDY, slot=0):
    driver = Driver(backend)
    driver.run([(slot, prompt, 0, True, setup)])
    for _ in range(count - 1):
        driver.run(generate=[slot])
    return driver.tokens[slot]


def test_greedy_tokens_alone_are_those_of_transformers(checkpoint, backend):
    for prompt in prompts_of(1, 7, 8, 9, 23):
        assert alone(backend, prompt, 12) == reference(checkpoint, prompt, 12)[0]


def test_greedy_tokens_and_log_probs_in_a_mixed_batch_are_those_of_transformers(checkpoint, backend):
    prompts = prompts_of(5, 16, 1, 9)
    asked = SlotSetup(return_log_probs=True)
    driver = Driver(backend)
    driver.run([(0, prompts[0], 0, True, asked), (1, prompts[1], 0, True, asked)])
    driver.run([(2, prompts[2], 0, True, asked)], [1, 0])
    driver.run(generate=[0, 2, 1])
    driver.run([(3, prompts[3], 0, True, asked)], [2, 1, 0])
    for _ in range(6):
        driver.run(generate=[3, 0, 2, 1])
    for slot, prompt in enumerate(prompts):
        tokens, log_probs, _ = reference(checkpoint, prompt, len(driver.tokens[slot]))
        assert driver.tokens[slot] == tokens
        np.testing.assert_allclose(driver.log_probs[slot], log_probs, atol=1e-4)


def test_a_prompt_in_chunks_beside_others_gives_the_same_tokens(checkpoint, backend):
    long, short = prompts_of(29, 4)
    driver = Driver(backend)
    driver.run([(4, short, 0, True, GREEDY)])
    output = driver.run([(2, long[:8], 0, False, GREEDY)], [4])
    assert output.slots.tolist() == [4]
    driver.run([(2, long[8:24], 8, False, None)], [4])
    driver.run([(2, long[24:], 24, True, None)], [4])
    for _ in range(5):
        driver.run(generate=[2, 4])
    assert driver.tokens[2] == reference(checkpoint, long, 6)[0]
    assert driver.tokens[4] == reference(checkpoint, short, 9)[0]


def test_a_step_that_yields_no_token_returns_an_empty_output(backend):
    output = run(backend, [(0, list(range(8)), 0, False, SlotSetup(return_log_probs=True))])
    assert len(output.slots) == len(output.tokens) == len(output.finish) == 0
    assert output.failures == {} and output.log_probs is None


def test_a_sample_is_the_same_alone_batched_chunked_and_in_another_slot(backend):
    setup = SlotSetup(SamplingConfig(temperature=0.9, top_k=40, top_p=0.95, random_seed=2**63 + 11))
    prompt, *others = prompts_of(17, 6, 11)
    expected = alone(backend, prompt, 8, setup)

    driver = Driver(backend)
    driver.run([(slot, other, 0, True, SlotSetup(SamplingConfig(top_p=0.8, random_seed=slot)))
                for slot, other in enumerate(others)])
    driver.run([(4, prompt[:16], 0, False, setup)], [1, 0])
    driver.run([(4, prompt[16:], 16, True, None)], [1, 0])
    for _ in range(7):
        driver.run(generate=[0, 4, 1])
    assert driver.tokens[4] == expected
    assert alone(backend, prompt, 8, SlotSetup(dataclasses.replace(setup.sampling, random_seed=12))) != expected


def test_all_layouts_give_the_same_tokens(checkpoint):
    prompts, texts = prompts_of(9, 14, 3), []
    for layout in LAYOUTS:
        driver = Driver(build(checkpoint, layout=layout))
        driver.run([(0, prompts[0], 0, True, GREEDY)])
        driver.run([(1, prompts[1], 0, True, SlotSetup(SamplingConfig(top_k=20, random_seed=4)))], [0])
        driver.run([(2, prompts[2], 0, True, GREEDY)], [0, 1])
        for _ in range(5):
            driver.run(generate=[2, 1, 0])
        texts.append(driver.tokens)
    assert texts[0] == texts[1]


def plant(backend, where, value):
    with torch.inference_mode():
        backend._parts.pool[where] = value


class FaultyModel:
    """A model that raises in `forward` or `logits`, after the keys and values were written."""

    def __init__(self, model):
        self.model, self.calls, self.fail_at = model, 0, None

    def embed(self, token_ids):
        return self.model.embed(token_ids)

    def forward(self, hidden, positions, attention):
        hidden = self.model.forward(hidden, positions, attention)
        self.fail("forward")
        return hidden

    def logits(self, hidden):
        self.fail("logits")
        return self.model.logits(hidden)

    def fail(self, where):
        if self.fail_at == where:
            self.fail_at = None
            raise RuntimeError("injected")


@pytest.mark.parametrize("where", ["forward", "logits"])
def test_after_an_injected_raise_the_halves_give_what_the_whole_would_have_given(checkpoint, backend, where):
    prompts = prompts_of(9, 14, 3)
    form = backend._forms._forms[-1]
    model = form._model = form._forward._model = FaultyModel(form._model)
    if form.name == "padded":
        form._forward._unpadded._model = model
    form._head.logits = model.logits
    driver = Driver(backend)
    driver.run([(0, prompts[0], 0, True, GREEDY), (1, prompts[1], 0, True, GREEDY)])
    for _ in range(3):
        contexts = [(2, prompts[2], 0, True, GREEDY)] if 2 not in driver.lengths else []
        generate = [slot for slot in (1, 0, 2) if slot in driver.lengths]
        whole = step(contexts, [(slot, driver.lengths[slot]) for slot in generate])
        model.fail_at = where
        with pytest.raises(RuntimeError, match="injected"):
            backend.start(whole)
        halves = [whole.take(range(1, 3)), whole.take([0])]
        parts = [backend.start(half).finish() for half in halves]
        for part, half in zip(parts, halves):
            slots = half.slots()
            driver.take([c for c in contexts if c[0] in slots], [s for s in generate if s in slots], part)
    for slot, prompt in enumerate(prompts):
        assert driver.tokens[slot] == reference(checkpoint, prompt, len(driver.tokens[slot]))[0]


def test_a_step_that_succeeded_can_run_again(backend):
    prompts = prompts_of(9, 14)
    driver = Driver(backend)
    driver.run([(0, prompts[0], 0, True, GREEDY)])
    mixed = step([(1, prompts[1], 0, True, GREEDY)], [(0, 9)])
    first, second = (backend.start(mixed).finish() for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist()


def test_a_value_that_is_not_finite_in_one_sequences_blocks_fails_exactly_its_row(backend):
    prompts = prompts_of(9, 14, 20)
    driver = Driver(backend)
    driver.run([(slot, prompt, 0, True, GREEDY) for slot, prompt in enumerate(prompts)])
    clean = run(backend, rows=[(0, 9), (1, 14), (2, 20)])
    plant(backend, (blocks_of(1)[0], 1, 1, 0, 3, 5), torch.nan)
    broken = run(backend, rows=[(0, 9), (1, 14), (2, 20)])
    assert {slot: failure.code for slot, failure in broken.failures.items()} == {1: ErrorCode.NON_FINITE_LOGITS}
    assert broken.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    clears = tuple(map(BlockClear, blocks_of(1)))
    backend.start(dataclasses.replace(
        step(rows=[(0, 9)]), operations=clears, first_operation=backend._operations.num_done)).finish()
    assert not backend._parts.pool[blocks_of(1)].any() and backend._parts.pool[blocks_of(0)].any()
    assert run(backend, [(1, prompts[1], 0, True, GREEDY)]).failures == {}


def test_a_chunk_that_is_not_the_last_fails_when_it_is_not_finite(backend):
    prompts = prompts_of(24, 24)
    run(backend, [(slot, prompt[:8], 0, False, GREEDY) for slot, prompt in enumerate(prompts)])
    plant(backend, (blocks_of(1)[0], 0, 0, 0, 0, 0), torch.inf)
    output = run(backend, [(slot, prompt[8:16], 8, False, None) for slot, prompt in enumerate(prompts)])
    assert list(output.failures) == [1] and len(output.slots) == 0


def test_a_token_outside_the_vocabulary_fails_its_row(backend):
    run(backend, [(0, [1, 2, 3], 0, True, GREEDY), (1, [4, 5], 0, True, GREEDY)])
    sample = backend._parts.decoder.sample

    def sample_too_large(*step):
        sampled = sample(*step)
        sampled.tokens[1] = VOCAB
        return sampled

    backend._parts.decoder.sample = sample_too_large
    output = run(backend, rows=[(0, 3), (1, 2)])
    assert output.failures == {}, "that is for the check of every backend's output to say"
    batch = ScheduledBatch(2, generation=GenerationWork(np.array([0, 1], np.int32), np.array([3, 2], np.int32)))
    failures = StepOutputCheck(VOCAB).checked(batch, output, {}).failures
    assert {slot: failure.code for slot, failure in failures.items()} == {1: ErrorCode.INVALID_TOKEN}


def test_the_end_id_is_recognised(checkpoint, backend):
    [prompt] = prompts_of(6)
    tokens = reference(checkpoint, prompt, 2)[0]
    run(backend, [(0, prompt, 0, True, SlotSetup(end_id=tokens[1]))])
    assert run(backend, rows=[(0, 6)]).finish.tolist() == [END_ID]


def test_logits_come_back_for_those_who_asked(checkpoint, backend):
    long, short = prompts_of(20, 5)
    asked = SlotSetup(return_context_logits=True, return_generation_logits=True)
    first = run(backend, [(0, short, 0, True, GREEDY), (1, long[:16], 0, False, asked)])
    second = run(backend, [(1, long[16:], 16, True, None)], [(0, 5)])
    third = run(backend, rows=[(0, 6), (1, 20)])
    *_, logits = reference(checkpoint, long, 2)
    assert list(first.context_logits) == list(second.context_logits) == [1] and not third.context_logits
    assert not first.generation_logits and list(second.generation_logits) == list(third.generation_logits) == [1]
    context = np.concatenate([first.context_logits[1], second.context_logits[1]])
    np.testing.assert_allclose(context, logits[:20], atol=2e-4)
    np.testing.assert_allclose(second.generation_logits[1], logits[None, 19], atol=2e-4)
    np.testing.assert_allclose(third.generation_logits[1], logits[None, 20], atol=2e-4)
    assert context.dtype == third.generation_logits[1].dtype == np.float32


def test_more_slots_than_announced_are_taken(checkpoint):
    backend = build(checkpoint, num_slots=1)
    [prompt] = prompts_of(6)
    assert alone(backend, prompt, 4, slot=4) == reference(checkpoint, prompt, 4)[0]


def test_the_backend_says_what_it_is(checkpoint):
    backend = build(checkpoint, max_seq_len=48, num_threads=1)
    info = backend.info
    assert (info.vocab_size, info.max_seq_len, info.num_blocks, info.tokens_per_block, info.num_slots) == (
        VOCAB, 48, BLOCKS, SIZE, 5)
    assert (info.dispatch, info.device, info.dtype) == ("torch", "cpu", "float32")
    assert build(checkpoint).info.max_seq_len == 64
    usage = backend.memory_usage()
    assert usage.gpu == usage.pinned == 0 and usage.cpu > backend._parts.pool.nbytes


def test_closing_gives_the_memory_back_and_may_be_done_twice(checkpoint):
    backend = build(checkpoint)
    run(backend, [(0, [1, 2], 0, True, GREEDY)])
    pool = weakref.ref(backend._parts.pool)
    model = weakref.ref(backend._forms._forms[-1]._model)
    backend.close()
    assert pool() is None and model() is None and backend.memory_usage().cpu == 0
    backend.close()


def test_the_number_of_threads_is_set_around_a_step_only(checkpoint):
    backend, seen = build(checkpoint, num_threads=2), []
    model = backend._forms._forms[-1]._model
    forward = model.forward
    model.forward = lambda *args: seen.append(torch.get_num_threads()) or forward(*args)
    before = torch.get_num_threads()
    run(backend, [(0, [1, 2], 0, True, GREEDY)])
    assert seen == [2] and torch.get_num_threads() == before == 1


def test_everything_is_launched_on_the_stream_of_the_backend(checkpoint, monkeypatch):
    entered, left = [], []

    @contextlib.contextmanager
    def on_device(device, stream=None):
        entered.append(stream)
        yield
        left.append(stream)

    def refuse(name):
        method = getattr(TorchPagedAttention, name)
        return lambda *args: method(*args) if len(entered) > len(left) else pytest.fail(f"{name} on no stream")

    for name in ("plan", "run"):
        monkeypatch.setattr(TorchPagedAttention, name, refuse(name))
    monkeypatch.setattr(build_backend, "make_stream", lambda device: "the stream")
    monkeypatch.setattr(native_backend, "finish_stream", entered.append)
    for module in (build_backend, warm_up, native_backend):
        monkeypatch.setattr(module, "on_device", on_device)
    monkeypatch.setattr(build_backend, "on_stream", lambda stream: on_device(None, stream))
    backend = build(checkpoint)
    in_warm_up = len(entered)
    run(backend, [(0, [1, 2], 0, True, GREEDY)])
    assert len(entered) == in_warm_up + 1
    backend.close()
    assert len(entered) == in_warm_up + 2 and set(entered) == {"the stream"}


def test_what_kernels_sample_and_attend_in_is_set_aside(checkpoint, monkeypatch):
    set_aside = step_bytes_of(monkeypatch)
    for by_kernels in (False, True):
        for module in (build_backend, memory_plan):
            monkeypatch.setattr(module, "use_triton", lambda _, by_kernels=by_kernels: by_kernels)
        build(checkpoint, max_batch_size=7).close()
    assert scratch_bytes(7, VOCAB, 4) > 7 * 2048 * 4
    config = checkpoint[1].config
    of_attention = attention_scratch_bytes(7, config.num_attention_heads, config.num_key_value_heads,
                                           config.hidden_size // config.num_attention_heads, 4, 132)
    assert set_aside[1] - set_aside[0] == scratch_bytes(7, VOCAB, 4) + of_attention


@pytest.mark.parametrize("layout, most_tokens", [(packing.packed, 32 + 128), (packing.split, 24)])
def test_the_memory_of_the_largest_graph_is_set_aside(checkpoint, monkeypatch, layout, most_tokens):
    """All graphs use the memory of the largest one, which is that of a step with its tokens and rows of logits.

    An engine for 20 sequences and 100 tokens captures generation steps of up to 24 rows. With the layout `packed`, it
    also captures steps with contexts, of up to 32 generation rows and 128 context tokens.
    """
    set_aside = step_bytes_of(monkeypatch)
    for captures in (False, True):
        monkeypatch.setattr(build_backend, "wanted_forms", lambda asked, captures=captures: {
            name: reason for name, reason in table.wanted_forms(asked).items() if name != "graph" or not captures})
        monkeypatch.setattr(table, "make_graph", lambda *given: None)
        build(checkpoint, layout=layout, num_slots=20, max_batch_size=7, max_num_tokens=100).close()
    spec = build_backend.load_model(checkpoint[0], device=torch.device("cpu"), dtype="float32").spec
    expected = memory_plan.step_bytes(spec, torch.float32, most_tokens, 24 + MOST_CONTEXTS, processors=0)
    assert set_aside[1] - set_aside[0] == expected > 24 * VOCAB * 4


def step_bytes_of(monkeypatch):
    """Return a list to which each engine that is built appends the bytes that it sets aside for steps."""
    set_aside, plan = [], memory_plan.plan_memory
    monkeypatch.setattr(memory_plan, "plan_memory", lambda *args, **facts: (
        set_aside.append(facts["step_bytes"]) or plan(*args, **facts)))
    return set_aside


def test_the_warm_up_samples_from_logits_of_each_dtype_that_serving_has(checkpoint, monkeypatch):
    """The warm-up of a bfloat16 engine samples from bfloat16 and from float32 logits, as steps do later.

    The sampling kernel has a variant for each dtype, which the warm-up must compile.
    """
    seen = set()

    class ReadsAnyDtype(GptDecoder):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            sample, self._samples_any_dtype = self._sample_token, True
            self._sample_token = lambda logits, only_greedy=False, **more: (
                seen.add((logits.dtype, only_greedy)) or sample(logits.float(), **more))

    monkeypatch.setattr(build_backend, "GptDecoder", ReadsAnyDtype)
    build(checkpoint, dtype="bfloat16")
    # All kernels of greedy steps are used by sampled steps too.
    assert seen == {(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)}


def test_the_pool_is_clean_after_the_warm_up_and_nobodys_random_state_moved(checkpoint):
    state = torch.get_rng_state()
    backend = build(checkpoint)
    run(backend, [(0, [1, 2], 0, True, SlotSetup(SamplingConfig(top_p=0.9)))])
    assert torch.equal(torch.get_rng_state(), state)
    assert not build(checkpoint)._parts.pool.any()


@pytest.mark.parametrize("changes, text", [
    ({"cuda_graphs": True}, "cuda_graphs is True, but the device is cpu"),
    ({"max_seq_len": 65}, "the model has positions for 64 tokens"),
    ({"device": "tpu"}, "device is 'tpu'"),
    ({"device": "meta"}, "device is 'meta'"),
])
def test_what_cannot_run_is_refused_before_anything_starts(checkpoint, changes, text):
    with pytest.raises(ConfigError, match=text):
        build(checkpoint, **changes)


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(checkpoint):
    with pytest.raises(InsufficientMemoryError, match="lower KvCacheConfig.max_tokens"):
        build(checkpoint, kv_cache_config=KvCacheConfig(max_tokens=10**12))


@pytest.mark.parametrize("num_slots", [10**13, 2**70])
def test_more_sequences_than_memory_has_room_for_are_refused_before_anything_is_made(
        checkpoint, num_slots, monkeypatch):
    monkeypatch.setattr(build_backend, "make_kv_pool", lambda *_: pytest.fail("made a pool"))
    with pytest.raises(InsufficientMemoryError, match=f"{num_slots:,} sequences.*lower max_num_sequences"):
        build(checkpoint, num_slots=num_slots)


@pytest.mark.parametrize("part", ["make_kv_pool", "make_attention", "BlockTables", "GptDecoder"])
@pytest.mark.parametrize("fault, error", [
    (MemoryError("no room"), InsufficientMemoryError), (ValueError("too large"), ConfigError),
    (RuntimeError("DefaultCPUAllocator: no room"), InsufficientMemoryError), (OverflowError("too large"), ConfigError)])
def test_whatever_cannot_be_made_is_refused_with_the_sizes(checkpoint, part, fault, error, monkeypatch):
    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(build_backend, part, fail)
    with pytest.raises(ConfigError, match="5 sequences of 64 tokens") as raised:
        build(checkpoint)
    assert type(raised.value) is error and raised.value.__cause__ is fault and str(fault) in str(raised.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_do_not_fit_are_refused_with_the_numbers(checkpoint, load_format, monkeypatch):
    monkeypatch.setattr(build_backend, "free_memory", lambda device: 12_345)
    with pytest.raises(InsufficientMemoryError, match="do not fit.*; expected at most 12,345 bytes, which are free"):
        build(checkpoint, load_format=load_format)


@pytest.mark.parametrize("fault, error", [(ValueError("odd"), ConfigError), (MemoryError(), InsufficientMemoryError)])
def test_a_model_that_cannot_run_a_step_is_refused_before_anything_starts(checkpoint, fault, error):
    class Attention:
        dispatch = "torch"

        def plan(self, step):
            raise fault

    with pytest.raises(ConfigError, match=type(fault).__name__) as raised:
        build_native_backend(checkpoint[0], params(), layout=packing.packed, num_slots=1,
                             attention_factory=lambda *_: Attention())
    assert type(raised.value) is error and raised.value.__cause__ is fault


@pytest.mark.parametrize("rows, tokens", [([0], {0: False, 5: True}), (slice(None), {0: False, 5: False})])
def test_a_model_that_is_not_finite_for_the_token_of_the_warm_up_is_made(checkpoint, rows, tokens, tmp_path):
    model = copy.deepcopy(checkpoint[1])
    with torch.no_grad():
        model.model.embed_tokens.weight[rows] = torch.nan
    model.save_pretrained(tmp_path)
    backend = build_native_backend(tmp_path, params(), layout=packing.packed, num_slots=5, max_beam_width=3)
    for token, is_finite in tokens.items():
        output = run(backend, [(1, [token], 0, True, GREEDY)])
        assert (not output.failures) is is_finite
    backend.close()


@pytest.mark.parametrize("method, change, told", [
    ("logits", lambda found: found[:, :50], r"a tensor of shape \[1, 50\] and dtype float32 on cpu; .*\[1, 160\]"),
    ("logits", lambda found: torch.cat([found, found], 1), r"shape \[1, 320\]"),
    ("logits", lambda found: found.double(), "dtype float64 on cpu; .*dtype float32"),
    ("logits", lambda found: found.bfloat16(), "dtype bfloat16 on cpu; .*dtype float32"),
    ("logits", lambda found: found[0], r"shape \[160\]"),
    ("logits", lambda found: found[:0], r"shape \[0, 160\]"),
    ("logits", lambda found: None, "a value of type NoneType"),
    ("forward", lambda found: found[:-1], r"shape \[0, 48\] .*; "
                                               r"expected a tensor of shape \[1, 48\] and dtype float32"),
    ("forward", lambda found: found.double(), "dtype float64"),
    ("embed", lambda found: found[:, :8], r"shape \[1, 8\]"),
    ("embed", lambda found: found.tolist(), "a value of type list"),
])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_what_a_model_returns_is_checked_when_it_is_loaded(checkpoint, method, change, told, layout, monkeypatch):
    model_class = find_model("LlamaForCausalLM")
    original = getattr(model_class, method)
    monkeypatch.setattr(model_class, method, lambda *given: change(original(*given)))
    with pytest.raises(ConfigError, match=rf"Llama\.{method} returned .*{told}.*; correct the model's class") as raised:
        build(checkpoint, layout=layout)
    assert raised.value.__cause__ is None


def test_hidden_states_may_be_float32_beside_other_weights_and_nobody_checks_a_later_step(checkpoint, monkeypatch):
    model_class = find_model("LlamaForCausalLM")
    forward, logits = model_class.forward, model_class.logits
    monkeypatch.setattr(model_class, "forward", lambda *given: forward(*given).float())
    monkeypatch.setattr(model_class, "logits", lambda model, hidden: logits(model, hidden.bfloat16()))
    backend = build(checkpoint, dtype="bfloat16")
    monkeypatch.setattr(model_class, "logits", lambda model, hidden: logits(model, hidden.bfloat16()).double())
    assert not run(backend, [(1, [5], 0, True, GREEDY)]).failures
    backend.close()


def test_a_folder_without_a_model_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError):
        build_native_backend(tmp_path, params(), layout=packing.packed, num_slots=1)


def test_random_weights_need_no_weight_file(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    backend = build_native_backend(tmp_path, params(load_format="dummy"), layout=packing.packed, num_slots=2)
    assert len(alone(backend, [1, 2, 3], 4)) == 4


def test_another_attention_can_be_passed_in(checkpoint):
    from batch_manager.attention.registry import make_attention

    made = []

    def factory(spec, kv_pool):
        made.append((spec.num_layers, tuple(kv_pool.shape)))
        return make_attention(spec, kv_pool)

    build_native_backend(checkpoint[0], params(), layout=packing.packed, num_slots=1, attention_factory=factory)
    assert made == [(3, (BLOCKS, 3, 2, 2, SIZE, 8))]


def test_in_bfloat16_the_log_probs_are_close_to_those_of_float32(checkpoint):
    backend, [prompt] = build(checkpoint, dtype="bfloat16"), prompts_of(9)
    assert backend.info.dtype == "bfloat16" and backend._parts.pool.dtype == torch.bfloat16
    output = run(backend, [(0, prompt, 0, True, SlotSetup(return_context_logits=True))])
    *_, logits = reference(checkpoint, prompt, 1)
    error = np.abs(output.context_logits[0] - logits.numpy()).max()
    assert error < 0.1 * logits.abs().max()                        # seven bits of mantissa through three layers


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_on_a_gpu_tokens_and_log_probs_are_those_of_the_cpu(checkpoint, layout, monkeypatch):
    setups = [SlotSetup(return_log_probs=True),
              SlotSetup(SamplingConfig(top_k=20, top_p=0.9, random_seed=4), return_log_probs=True),
              SlotSetup(SamplingConfig(temperature=0.7, top_p=1.0, random_seed=2**64 - 1))]
    # In a rehearsal, capturing takes long, and test_recorded_steps.py replays steps with contexts.
    graphs = not IS_REHEARSAL or layout is packing.split
    replayed = _check_on_a_gpu(checkpoint, layout, setups, monkeypatch, graphs)
    # The generation steps; with the layout `packed`, also the steps with contexts.
    assert replayed == graphs * {packing.packed: 2 + GENERATED, packing.split: GENERATED, packing.padded: 0}[layout]


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_features_do_what_they_do_on_the_cpu(checkpoint, monkeypatch):
    penalties = dict(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, no_repeat_ngram_size=2,
                     min_length=5)
    sampling = dict(top_p=0.95, top_p_decay=0.9, top_p_min=0.3, min_p=0.02, random_seed=5)
    others = dict(bad_words=((3,), (5, 7)), stop_words=((8, 9),), end_id=4,
                  embedding_bias=np.linspace(2, 0, 160, dtype=np.float32), return_log_probs=True)
    setups = [SlotSetup(SamplingConfig(**penalties), **others, prompt_length=9),
              SlotSetup(SamplingConfig(**penalties, **sampling), **others, prompt_length=20),
              SlotSetup(SamplingConfig(top_p=1.0, min_p=0.1), prompt_length=3)]
    graphs = not IS_REHEARSAL                                       # which takes long, and replays none of these steps
    assert _check_on_a_gpu(checkpoint, packing.packed, setups, monkeypatch, graphs) == 0


def _check_on_a_gpu(checkpoint, layout, setups, monkeypatch, graphs=True):
    """Run three sequences in torch on the CPU, on the GPU, and on the GPU with graphs if the layout can have graphs.

    Tokens and log-probs must be the same. Return the number of steps that were replayed as graphs.
    """
    prompts, results, replays = prompts_of(9, 20, 3), [], []
    setups = [setup.continuing(prompt) for setup, prompt in zip(setups, prompts)]
    start = GraphForm.start
    monkeypatch.setattr(GraphForm, "start", lambda *given: replays.append(1) or start(*given))

    def generated(device, **options):
        kv = KvCacheConfig(tokens_per_block=16, max_tokens=16 * BLOCKS)            # a GPU refuses blocks of SIZE tokens
        driver = Driver(build(checkpoint, layout=layout, device=device, dtype="float32", kv_cache_config=kv,
                              max_num_tokens=64, **options))
        replays.clear()                                                                # those of the check
        assert ("graph" in driver.backend._forms.steps) == options.get("cuda_graphs", False)
        driver.run([(0, prompts[0], 0, True, setups[0]), (1, prompts[1][:16], 0, False, setups[1])])
        driver.run([(1, prompts[1][16:], 16, True, None), (2, prompts[2], 0, True, setups[2])], [0])
        for _ in range(GENERATED):
            driver.run(generate=[2, 0, 1])
        driver.backend.close()
        return driver

    with in_torch():
        expected = generated("cpu")
    results.append(generated(GPU, cuda_graphs=False))
    assert replays == []
    if graphs and layout is not packing.padded:
        results.append(generated(GPU, cuda_graphs=True))
    for result in results:
        assert expected.tokens == result.tokens
        for slot in (0, 1):
            np.testing.assert_allclose(expected.log_probs[slot], result.log_probs[slot], atol=1e-3)
    return len(replays)


@pytest.mark.parametrize("drafts", [1, 3])
def test_the_rows_of_draft_tokens_are_those_of_the_same_tokens_one_by_one(checkpoint, drafts):
    """A step with draft tokens computes, for each draft, the logits that one-by-one generation of these tokens gives.
    """
    backend = build(checkpoint)
    prompts = prompts_of(7, 5)
    expected = [reference(checkpoint, prompt, drafts + 2)[0] for prompt in prompts]
    for slot, prompt in enumerate(prompts):
        driver = Driver(backend)
        driver.run([(slot, prompt, 0, True, SlotSetup())])
        assert driver.tokens[slot] == expected[slot][:1]
    wrong = (expected[1][1] + 1) % VOCAB
    batch = ScheduledBatch(iteration=1, generation=GenerationWork(
        np.array([0, 1], np.int32), np.array([7, 5], np.int32), num_drafts=np.array([drafts, 1], np.int32),
        draft_tokens=np.array([*expected[0][1:drafts + 1], wrong], np.int32)))
    form, returned, tensors = backend._forms._forms[-1], {}, {}
    with torch.inference_mode():
        (call,) = packing.packed(batch, backend._parts.tables, SIZE)
        hidden, rows = form._run(call, None, tensors, returned)
        tokens = form._head.logits(hidden).argmax(-1).tolist()
    assert tokens[:drafts + 1] == expected[0][1:]
    assert tokens[drafts + 1] == expected[1][1], "what precedes the wrong draft is not touched by it"
    assert rows.slots.tolist() == [0] * (drafts + 1) + [1] * 2
    assert rows.positions.tolist() == [*range(8, 8 + drafts + 1), 6, 7]
    assert returned == tensors == {}
    backend.close()
