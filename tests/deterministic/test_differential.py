"""With deterministic=True, a request's tokens, log-probabilities and logits have the same bits alone and in any batch.

Chunks, pauses, layouts, overlapping steps and block reuse do not change them either.
"""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch

from batch_manager import GptManager, KvCacheConfig, SchedulerPolicy, TrtGptModelOptionalParams, TrtGptModelType

IN_TORCH = {"cpu_compile": False}
FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_neox", "olmo2", "austen-4m"]
# Each family in one dtype at least, and what has products or a cache of its own.
CASES = [(family, dtype, {}) for family in FAMILIES for dtype in ("float32", "bfloat16")
         if (family, dtype) not in {("mistral", "bfloat16"), ("gpt_neox", "float32"), ("olmo2", "bfloat16")}]
CASES += [("qwen2_moe", "bfloat16", {}), ("llama", "bfloat16", {"quantization": "int4"}),
          ("qwen3", "float32", {"kv_cache_options": {"kv_cache_dtype": "fp8_e4m3"}}),
          ("gpt2", "float32", IN_TORCH), ("gemma3", "bfloat16", IN_TORCH), ("llama", "float16", IN_TORCH)]
RUNS, ASKS = 3, 6
assert len(CASES) * RUNS * ASKS >= 300          # pairs
BLOCK = 16


def random_runs(differential, family, seed, runs=RUNS, asks=ASKS, **options):
    draw = random.Random(seed)
    for _ in range(runs):
        together = {number: differential.draw_ask(draw, differential.vocab_of(family), BLOCK, **options)
                    for number in range(1, asks + 1)}
        yield together, differential.draw_circumstances(draw, together, BLOCK)


@pytest.fixture
def laboratory(laboratory):
    return partial(laboratory, tokens_per_block=BLOCK)


@pytest.mark.parametrize(("family", "dtype", "options"), CASES)
def test_company_chunks_pauses_layouts_and_overlap_do_not_show(differential, laboratory, family, dtype, options):
    lab = laboratory(family, dtype=dtype, **options)
    for asks, circumstances in random_runs(differential, family, f"{family} {dtype}"):
        assert lab.differences(asks, circumstances) == {}, circumstances
    assert lab.num_pauses > 0


def test_the_normal_mode_does_show_them(differential, laboratory):
    # The other tests of this file can fail only if these differences exist. Compiled steps have few: none without AMX.
    for family in ("gpt2", "llama", "qwen2"):
        lab = laboratory(family, deterministic=False, tokens_per_block=8, cpu_compile=False)
        assert any(lab.differences(asks, circumstances)
                   for asks, circumstances in random_runs(differential, family, f"{family} float32", runs=3))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_pause_at_every_token(differential, laboratory, family):
    lab, draw = laboratory(family), random.Random(1)
    prompts = [tuple(draw.randrange(200) for _ in range(length)) for length in (2 * BLOCK, 60)]
    asks = {1: differential.Ask(prompts[0], 7), 2: differential.Ask(prompts[1], 30, (("runtime_top_k", 20),))}
    before = lab.num_pauses
    for number in range(1, 7):
        assert lab.differences(asks, differential.Circumstances(pauses={1: {number}})) == {}
    everywhere = differential.Circumstances(pauses={1: set(range(1, 7)), 2: set(range(1, 30))}, chunk=0)
    assert lab.differences(asks, everywhere) == {}
    assert lab.num_pauses >= before + 6 + 6


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_chunks_at_every_boundary(differential, laboratory, family):
    lab, draw = laboratory(family), random.Random(2)
    asks = {length: differential.Ask(tuple(draw.randrange(200) for _ in range(length)), 3)
            for blocks in (1, 2, 8, 9) for length in (blocks * BLOCK - 1, blocks * BLOCK, blocks * BLOCK + 1)}
    for chunk in range(BLOCK, 10 * BLOCK, BLOCK):
        assert lab.differences(asks, differential.Circumstances(chunk=chunk, laziness=0.2, seed=chunk)) == {}


@pytest.mark.parametrize(("block", "options"), [
    (16, {"max_attention_window": 50}), (8, {"max_attention_window": 30, "sink_token_length": 70}),
    (128, {"max_attention_window": 100, "sink_token_length": 5})])
def test_windows_and_sinks(differential, laboratory, block, options):
    lab, draw = laboratory("qwen3", tokens_per_block=block, kv_cache_options=options), random.Random(3)
    asks = {number: differential.draw_ask(draw, 200, block, longest=260) for number in range(1, 7)}
    for chunk in (None, 0, block):
        circumstances = differential.Circumstances(chunk=chunk, pauses={1: {2}, 2: {1, 4}}, seed=chunk or 0)
        assert lab.differences(asks, circumstances) == {}


@pytest.mark.parametrize("compiled", [None, False])
def test_on_two_threads(differential, laboratory, compiled):
    """In compiled steps, the bits are those of one thread and of other blocks."""
    reference = None if compiled is False else laboratory("qwen2", tokens_per_block=64)
    lab, draw = laboratory("qwen2", num_threads=2, cpu_compile=compiled, reference=reference), random.Random(4)
    asks = {length: differential.Ask(tuple(draw.randrange(200) for _ in range(length)), 2) for length in (5, 17, 70)}
    assert lab.differences(asks, differential.Circumstances(chunk=BLOCK)) == {}


def test_the_threads_of_the_engine_stay_what_they_were_when_it_was_built(differential, tmp_path):
    lab = differential.Laboratory(differential.make_checkpoint("llama", tmp_path), num_threads=None, cpu_compile=False)
    ask, before = differential.Ask(tuple(range(20)), 2), torch.get_num_threads()
    seen = []
    backend = lab.backend("fused")
    model = backend._forms._forms[-1]._forward._model
    forward = model.forward
    model.forward = lambda *arguments: seen.append(torch.get_num_threads()) or forward(*arguments)
    try:
        torch.set_num_threads(before + 1)
        lab.alone(ask)
    finally:
        torch.set_num_threads(before)
        lab.close()
    assert set(seen) == {before}


def test_what_the_cache_has_does_not_show(differential, laboratory):
    lab, draw = laboratory("llama"), random.Random(5)
    prompt = tuple(draw.randrange(200) for _ in range(9 * BLOCK + 1))
    asks = [differential.Ask(prompt, 4, context_logits=False)]
    asks += [differential.Ask(prompt[:length], 4, sampling, context_logits=False)
             for length in range(BLOCK - 1, len(prompt) + 1) if length % BLOCK in (BLOCK - 1, 0, 1)
             for sampling in ((), (("runtime_top_k", 30),))]
    params = TrtGptModelOptionalParams(
        max_batch_size=8, kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK, enable_block_reuse=True))
    reused = differential.run_with_reuse(lab, params, asks)
    assert reused.blocks > 0
    for ask, outcome in zip(asks, reused.outcomes, strict=True):
        assert lab.alone(ask).differences(outcome) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_the_normal_mode_up_to_rounding(differential, laboratory, family):
    draw = random.Random(6)
    ask = differential.Ask(tuple(draw.randrange(200) for _ in range(150)), 5)
    rows = []
    for deterministic in (True, False):
        outcome = laboratory(family, deterministic=deterministic, cpu_compile=deterministic).alone(ask)
        rows.append(np.concatenate([np.frombuffer(logits, np.float32)
                                    for logits in (outcome.context_logits, outcome.generation_logits)]))
    assert np.abs(rows[1]).max() > 1
    np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=2e-5 * np.abs(rows[1]).max())


def test_through_a_manager_that_pauses(differential, new_client, tmp_path):
    folder, draw = differential.make_checkpoint("llama", tmp_path), random.Random(7)
    asks = {number: differential.Ask(tuple(draw.randrange(200) for _ in range(draw.randint(20, 40))), 20,
                                     differential.draw_ask(draw, 200, BLOCK).sampling) for number in range(1, 11)}
    lab = differential.Laboratory(folder, tokens_per_block=64)

    client = new_client()
    client.pending = [ask.request(number) for number, ask in asks.items()]
    params = TrtGptModelOptionalParams(
        deterministic=True, device="cpu", num_threads=1, max_batch_size=8, enable_chunked_context=True,
        max_num_tokens=48, enable_trt_overlap=True,
        kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK, max_tokens=80))
    with GptManager(folder, TrtGptModelType.InflightBatching, 1, SchedulerPolicy.MAX_UTILIZATION, client.get,
                    client.send, client.poll, client.return_stats, params, exclude_input_in_output=True):
        client.wait_for_finals(*asks)
    assert sum(json.loads(record)["Paused Requests"] for record in client.stats) > 3
    for number, ask in asks.items():
        outcome = differential.outcome_of(client.final(number).tensors)
        assert lab.alone(ask).differences(outcome) == []
    lab.close()
