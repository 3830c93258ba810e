"""With max_attention_window and sink_token_length, the native backend gives the tokens of transformers.

transformers gets an attention mask with the same window and sink tokens.
"""

import numpy as np
import pytest
import torch

from batch_manager.attention.registry import make_attention
from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.errors import ConfigError
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

VOCAB, SIZE, BLOCKS, MAX_LENGTH = 160, 8, 40, 64
GREEDY = SlotSetup()
WHOLE, CHUNKED = None, SIZE


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """Return (folder of the checkpoint, transformers model) of a tiny random Mistral with a window of 11 tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=MAX_LENGTH, initializer_range=0.3, sliding_window=11)).eval()
    folder = tmp_path_factory.mktemp("mistral")
    model.save_pretrained(folder)
    return folder, model


def build(checkpoint, window=None, sink=0, *, layout=packing.packed, **options):
    kv = KvCacheConfig(tokens_per_block=SIZE, max_tokens=BLOCKS * SIZE, max_attention_window=window,
                       sink_token_length=sink)
    return build_native_backend(checkpoint[0], TrtGptModelOptionalParams(device="cpu", kv_cache_config=kv),
                                layout=layout, num_slots=4, **options)


def prompts_of(*lengths):
    random = np.random.default_rng(5)
    return [random.integers(0, VOCAB, length).tolist() for length in lengths]


KNOWN = {}      # (model, prompt, window, sink) -> the prompt and the tokens found so far


def reference(model, prompt, guess, window=None, sink=0):
    """Return as many greedy tokens after the prompt as `guess` has, by transformers, with a mask of window and sinks.

    If `window` is None, the model's own mask applies. If the guess is right, one call of the model shows it.
    """
    tokens, count = KNOWN.setdefault((model, tuple(prompt), window, sink), list(prompt)), len(guess)

    @torch.inference_mode()
    def likeliest(tokens):
        mask = None
        if window is not None:
            position = torch.arange(len(tokens))
            back = position[:, None] - position
            visible = (back >= 0) & ((back < window) | (position < sink))
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        return model(torch.tensor([tokens]), attention_mask=mask).logits[0].argmax(-1).tolist()

    if len(tokens) < len(prompt) + count and likeliest(prompt + guess[:-1])[len(prompt) - 1 :] == guess:
        tokens[:] = prompt + guess
    while len(tokens) < len(prompt) + count:
        tokens.append(likeliest(tokens)[-1])
    return tokens[len(prompt):len(prompt) + count]


class Host:
    """Runs steps on a backend. Allocates blocks as sequences grow, and frees the blocks that leave the window.

    A freed block is filled with NaN.

    stale   True: the block-table entry of a freed block keeps the block id; False: it is reset to -1
    """

    def __init__(self, backend, window, sink, stale):
        self.backend, self.window, self.sink, self.stale = backend, window, sink, stale
        self.free, self.held, self.lengths, self.tokens, self.left = list(range(BLOCKS)), {}, {}, {}, {}
        self.gone = []                                             # entries to reset with the next step
        self.most_held, self.num_operations = 0, backend._operations.num_done

    def run(self, contexts=(), generate=()):
        """Run a step and store its tokens.

        contexts   (slot, tokens of the chunk, position of its first token, whether it is the last chunk)
        generate   slots that generate a token
        """
        changes, self.gone, clears = self.gone, [], []
        works = []
        for slot, chunk, start, is_last in contexts:
            if start == 0:
                self.held[slot], self.tokens[slot] = {}, []
                self.left[slot] = -(-self.sink // SIZE)
            self.lengths[slot] = start + len(chunk)
            works.append(ContextWork(slot, np.array(chunk, np.int32), start, is_last, None if start else GREEDY))
        rows = [(slot, self.lengths[slot]) for slot in generate]
        for slot in generate:
            self.lengths[slot] += 1
        for slot in [work.slot for work in works] + list(generate):
            held = self.held[slot]
            for index in range(max(held, default=-1) + 1, -(-self.lengths[slot] // SIZE)):
                held[index] = self.free.pop(0)
                clears.append(BlockClear(held[index]))
                changes.append((slot, index, held[index]))
        output = self.backend.start(ScheduledBatch(
            iteration=0, context=tuple(works), generation=GenerationWork(*np.array(rows, np.int32).reshape(-1, 2).T),
            block_table_updates=BlockTableUpdates(*np.array(changes, np.int32).reshape(-1, 3).T),
            operations=tuple(clears), first_operation=self.num_operations)).finish()
        self.num_operations += len(clears)
        assert output.failures == {}
        for slot, token in zip(output.slots.tolist(), output.tokens.tolist()):
            self.tokens[slot].append(token)
        self.most_held = max(self.most_held, *(len(held) for held in self.held.values()))
        if self.window is not None:
            self.take_back()

    def take_back(self):
        for slot, length in self.lengths.items():
            while self.left[slot] < (length - self.window + 1) // SIZE:       # the next query is at `length`
                index = self.left[slot]
                block = self.held[slot].pop(index)
                with torch.inference_mode():
                    self.backend._parts.pool[block] = torch.nan
                self.free.insert(0, block)                         # at the front, so that it is soon reused
                self.left[slot] += 1
                if not self.stale:
                    self.gone.append((slot, index, -1))

    def prefill(self, slot, prompt, chunk, beside=()):
        for start in range(0, len(prompt), chunk or len(prompt)):
            end = min(start + (chunk or len(prompt)), len(prompt))
            self.run([(slot, prompt[start:end], start, end == len(prompt))], beside)


def alone(backend, prompt, count, window, sink, chunk=WHOLE, stale=True):
    host = Host(backend, window, sink, stale)
    host.prefill(0, prompt, chunk)
    for _ in range(count - 1):
        host.run(generate=[0])
    return host


LENGTHS = (5, 13, 14, 30)                                          # shorter than, as long as and longer than 13


@pytest.mark.parametrize("window, sink, chunk", [                       # each pair of values
    (window, sink, (WHOLE, CHUNKED)[(row + column) % 2]) for row, window in enumerate([13, 16])
    for column, sink in enumerate([0, 1, 4, SIZE, SIZE + 1])])
def test_alone_the_tokens_are_those_of_transformers_under_the_mask(checkpoint, window, sink, chunk):
    backend = build(checkpoint, window, sink)
    for prompt in prompts_of(*LENGTHS):
        count = MAX_LENGTH - 2 - len(prompt)
        host = alone(backend, prompt, count, window, sink, chunk, stale=chunk is WHOLE)
        assert len(host.tokens[0]) == count
        assert host.tokens[0] == reference(checkpoint[1], prompt, host.tokens[0], window, sink)
        assert host.left[0] > -(-sink // SIZE) + 2                  # several blocks were given back
        if chunk is CHUNKED:
            assert host.most_held <= -(-sink // SIZE) + -(-window // SIZE) + 2


@pytest.mark.parametrize("layout", [packing.packed, packing.split, packing.padded])
@pytest.mark.parametrize("sink, stale", [(0, True), (0, False), (4, True), (SIZE + 1, False)])
def test_batched_they_are_the_same(checkpoint, sink, stale, layout):
    host = Host(build(checkpoint, 13, sink, layout=layout), 13, sink, stale)
    prompts = prompts_of(*LENGTHS)
    host.prefill(0, prompts[0], WHOLE)
    for _ in range(9):
        host.run(generate=[0])
    host.prefill(3, prompts[3], CHUNKED, beside=[0])
    host.run([(1, prompts[1], 0, True), (2, prompts[2], 0, True)], [3, 0])
    for _ in range(25):
        host.run(generate=[2, 0, 3, 1])
    for slot, prompt in enumerate(prompts):
        assert len(host.tokens[slot]) >= 26
        assert host.tokens[slot] == reference(checkpoint[1], prompt, host.tokens[slot], 13, sink)


def test_the_window_and_the_sinks_both_change_the_text(checkpoint):
    [prompt] = prompts_of(30)
    texts = [tuple(reference(checkpoint[1], prompt, [0] * 20, *mask)) for mask in ((), (13, 0), (13, 4), (16, 4))]
    assert len(set(texts)) == 4


def test_a_window_that_no_sequence_outgrows_changes_nothing(checkpoint):
    [prompt] = prompts_of(20)
    backend = build(checkpoint, MAX_LENGTH, 4)
    tokens = alone(backend, prompt, 40, None, 0).tokens[0]
    assert len(tokens) == 40 and tokens == reference(checkpoint[1], prompt, tokens)


@pytest.mark.parametrize("chunk", [WHOLE, CHUNKED], ids=["whole", "chunks"])
def test_a_models_own_window_is_that_of_transformers(mistral, chunk):
    backend = build(mistral)
    for prompt in prompts_of(5, 11, 30):
        host = alone(backend, prompt, 30, 11, 0, chunk)
        assert len(host.tokens[0]) == 30 and host.tokens[0] == reference(mistral[1], prompt, host.tokens[0])


@pytest.mark.parametrize("configured, smaller", [(20, 11), (7, 7)])
@pytest.mark.parametrize("sink", [0, 4])
def test_with_a_models_and_a_configured_window_the_smaller_holds_and_sinks_stay(mistral, configured, smaller, sink):
    backend, [prompt] = build(mistral, configured, sink), prompts_of(30)
    tokens = alone(backend, prompt, 30, smaller, sink).tokens[0]
    assert len(tokens) == 30 and tokens == reference(mistral[1], prompt, tokens, smaller, sink)


def test_an_attention_that_is_passed_in_gets_the_windows_in_force_and_the_sinks_where_there_are_some(mistral):
    made = []

    def factory(spec, kv_pool, **more):
        made.append((tuple(layer.window for layer in spec.attention), more))
        return make_attention(spec, kv_pool, **more)

    for window, sink in ((None, 0), (20, 0), (7, 0), (7, 4), (MAX_LENGTH, 4)):
        build(mistral, window, sink, attention_factory=factory)
    assert made == [((11, 11), {}), ((11, 11), {}), ((7, 7), {}), ((7, 7), {"sink": 4}), ((11, 11), {"sink": 4})]


def test_an_attention_that_knows_no_sinks_is_refused_before_anything_starts(checkpoint):
    with pytest.raises(ConfigError, match="TypeError.*sink"):
        build(checkpoint, 16, 4, attention_factory=lambda spec, kv_pool: make_attention(spec, kv_pool))
    build(checkpoint, 16, 0, attention_factory=lambda spec, kv_pool: make_attention(spec, kv_pool))


def test_a_step_that_is_run_again_gives_the_same(checkpoint):
    host = Host(build(checkpoint, 13, 4), 13, 4, stale=False)
    prompts = prompts_of(20, 33)
    host.prefill(0, prompts[0], WHOLE)
    host.prefill(1, prompts[1], WHOLE, beside=[0])
    start = host.backend.start

    def start_twice(batch):
        start(batch).finish()                                      # as if a later part of the step had raised
        return start(batch)

    host.backend.start = start_twice
    for _ in range(20):
        host.run(generate=[0, 1])
    for slot, prompt in enumerate(prompts):
        assert host.tokens[slot] == reference(checkpoint[1], prompt, host.tokens[slot], 13, 4)
