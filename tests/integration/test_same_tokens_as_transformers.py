"""The engine gives the greedy tokens of transformers for its checkpoints, through the callbacks, in any batch."""

import json
import random

import numpy as np
import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy, SpeculativeConfig, TrtGptModelType
from tests.harness.client import StaggeredClient
from tests.integration.families import families_and_engines

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1


def prompts_of(vocab_size: int, lengths: list[int], seed: int = 0) -> dict[int, list[int]]:
    draw = random.Random(seed)
    return {i: [draw.randrange(vocab_size) for _ in range(length)] for i, length in enumerate(lengths)}


def around(tokens_per_block: int) -> list[int]:
    """Return prompt lengths: multiples of tokens_per_block up to 288, their neighbours, and 1, 2 and 300."""
    multiples = [tokens_per_block * count for count in (1, 2, 3, 4, 7, 9, 12, 18)]
    return sorted({1, 2, 300, *(m + d for m in multiples if m < 300 for d in (-1, 0, 1))})


def run(make_manager, new_client, new_request, reference, prompts, count, *, streaming_every=3, arrive_at_once=False,
        **options):
    items = [new_request(i, prompt, count(i), streaming=i % streaming_every == 0) for i, prompt in prompts.items()]
    client = new_client() if arrive_at_once else StaggeredClient(items, random.Random(0), [0, 0, 1, 2, 5])
    client.pending = items
    manager = make_manager(client, model_path=reference.folder, num_threads=1, **options)
    client.wait_for_finals(*prompts)
    assert manager.shutdown()
    for i, prompt in prompts.items():
        final = client.final(i)
        assert final.error == ""
        got = client.streamed(i) if i % streaming_every == 0 else final.tokens()[len(prompt):]
        assert got == reference.greedy(prompt, count(i), guess=got), f"prompt of {len(prompt)} tokens"
    return [json.loads(record) for record in client.stats]


@families_and_engines(("policy", "model_type", "chunked", "tokens_per_block"), [
    (MAX, FUSED, False, 16), (GUARANTEED, SPLIT, False, 64), (MAX, V1, False, 16), (GUARANTEED, FUSED, True, 16),
    (MAX, SPLIT, True, 32), (GUARANTEED, V1, False, 64)], each=1)
def test_every_prompt_length_around_a_block_in_a_staggered_batch(
        make_manager, new_client, new_request, reference, policy, model_type, chunked, tokens_per_block):
    prompts = prompts_of(reference.vocab_size, around(tokens_per_block))
    run(make_manager, new_client, new_request, reference, prompts, lambda i: 6 + i % 3, policy=policy,
        model_type=model_type, enable_chunked_context=chunked, max_batch_size=32,
        max_num_tokens=128 if chunked else 512,
        kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=32 * 320))


@families_and_engines(("model_type", "chunked", "max_num_tokens"), [
    (FUSED, False, 128), (SPLIT, True, 128), (FUSED, False, 16)], each=1)
def test_a_pool_so_small_that_requests_are_paused_again_and_again(
        make_manager, new_client, new_request, reference, model_type, chunked, max_num_tokens):
    prompts = prompts_of(reference.vocab_size, [5, 9, 7, 8, 3, 2, 1, 6], seed=1)
    records = run(make_manager, new_client, new_request, reference, prompts, lambda i: 26, policy=MAX,
                  model_type=model_type, enable_chunked_context=chunked, max_num_tokens=max_num_tokens,
                  max_batch_size=8,
                  kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=8 * 8), arrive_at_once=True)
    assert sum(record["Paused Requests"] for record in records) > len(prompts)    # windows free some blocks
    assert records[-1]["Max KV cache blocks"] == 8


@pytest.mark.parametrize("model_type", [FUSED, V1])
@pytest.mark.parametrize("batch", [1, 2, 32])
def test_batches_of_any_size(make_manager, new_client, new_request, llama_reference, batch, model_type):
    prompts = prompts_of(llama_reference.vocab_size, [(7 * i) % 90 + 1 for i in range(40)], seed=2)
    run(make_manager, new_client, new_request, llama_reference, prompts, lambda i: 3 + i % 9, max_batch_size=batch,
        model_type=model_type,
        kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=32 * 128))


@families_and_engines(("chunked", "tokens_per_block"), [(False, 16), (True, 8)], each=1)
def test_drafts_from_prompts_that_repeat_a_phrase(make_manager, new_client, new_request, reference, chunked,
                                                  tokens_per_block, monkeypatch):
    # All drafts pay, also rejected ones.
    monkeypatch.setattr("batch_manager.loop.drafting.share_of_a_draft", lambda *given: 0.001)
    phrase = prompts_of(reference.vocab_size, [7], seed=4)[0]
    prompts = {i: 3 * phrase + phrase[:i] for i in range(1, 5)}
    records = run(make_manager, new_client, new_request, reference, prompts, lambda i: 14 + i,
                  enable_chunked_context=chunked, max_num_tokens=24 if chunked else 512,
                  speculative_config=SpeculativeConfig(num_speculative_tokens=5),
                  kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=320))
    assert records[-1]["Draft Tokens"] > records[-1]["Draft Steps"] > 0


@families_and_engines(("model_type",), [(FUSED,), (V1,)], each=1)
def test_logits_equal_those_of_transformers(make_manager, new_client, new_request, reference, model_type):
    prompts = prompts_of(reference.vocab_size, [1, 15, 33, 64, 130], seed=3)
    client = new_client()
    client.pending = [new_request(i, prompt, 5, return_context_logits=True, return_generation_logits=True,
                                  return_log_probs=True) for i, prompt in prompts.items()]
    make_manager(client, model_path=reference.folder, enable_chunked_context=model_type is FUSED, max_num_tokens=48,
                 num_threads=1, kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=12 * 16), policy=MAX,
                 model_type=model_type)
    client.wait_for_finals(*prompts)
    for i, prompt in prompts.items():
        tensors = client.final(i).tensors
        everything = client.final(i).tokens()
        expected = reference.logits(everything)
        np.testing.assert_allclose(tensors["context_logits"][0], expected[:len(prompt)], atol=1e-4, rtol=0)
        generation = expected[len(prompt) - 1:-1]
        np.testing.assert_allclose(tensors["generation_logits"][0, 0], generation, atol=1e-4, rtol=0)
        log_probs = generation - np.log(np.exp(generation.astype(np.float64)).sum(axis=1, keepdims=True))
        chosen = log_probs[np.arange(5), everything[len(prompt):]]
        np.testing.assert_allclose(tensors["output_log_probs"][0, 0], chosen, atol=1e-4, rtol=0)


def test_samples_depend_on_the_request_and_its_seed_only(make_manager, new_client, new_request, llama_reference):
    prompts = prompts_of(llama_reference.vocab_size, [3, 20, 33, 47, 8, 60], seed=4)

    def sampled(**options):
        client = new_client()
        client.pending = [new_request(i, prompt, 25, temperature=0.8, runtime_top_k=20, runtime_top_p=0.9,
                                      random_seed=1000 + i) for i, prompt in prompts.items()]
        make_manager(client, model_path=llama_reference.folder, num_threads=1, **options)
        client.wait_for_finals(*prompts)
        return [client.final(i).tokens() for i in prompts]

    block = {"tokens_per_block": 16}
    alone = sampled(max_batch_size=1, kv_cache_config=KvCacheConfig(**block, max_tokens=128))
    assert alone == sampled(max_batch_size=8, kv_cache_config=KvCacheConfig(**block, max_tokens=4096))
    assert alone == sampled(max_batch_size=8, kv_cache_config=KvCacheConfig(**block, max_tokens=7 * 16),
                            enable_chunked_context=True, max_num_tokens=32)
    assert alone == sampled(max_batch_size=8, kv_cache_config=KvCacheConfig(**block, max_tokens=4096), model_type=V1)
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)


def test_a_static_batch_with_a_stopped_member_gives_the_others_the_same_tokens(
        make_manager, new_client, new_request, reference):
    prompts = prompts_of(reference.vocab_size, [3, 40, 17, 64, 1], seed=5)
    client = new_client()
    client.pending = [new_request(i, prompt, 10 + 5 * i) for i, prompt in prompts.items()]
    iterations = []
    client.return_stats = lambda record: iterations.append(json.loads(record))
    client.poll = lambda: {4} if len(iterations) == 12 else set()
    make_manager(client, model_path=reference.folder, num_threads=1, model_type=V1,
                 kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=32 * 16))
    client.wait_for_finals(*prompts)
    for i, prompt in prompts.items():
        got = client.final(i).tokens()[len(prompt):]
        assert got == reference.greedy(prompt, 13 if i == 4 else 10 + 5 * i, guess=got)
    assert iterations[0]["Total Context Tokens"] == 125
    assert iterations[0]["Total Generation Tokens"] == 100 and iterations[0]["Empty Generation Slots"] == 50


def test_padding_does_not_spread_a_token_whose_embedding_is_not_finite(
        make_manager, new_client, new_request, llama_reference, tmp_path):
    """Padding is token 0. A NaN embedding of token 0 does not affect requests without this token."""
    from safetensors.numpy import load_file, save_file

    (tmp_path / "config.json").write_bytes((llama_reference.folder / "config.json").read_bytes())
    weights = load_file(llama_reference.folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][0] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    prompts = prompts_of(llama_reference.vocab_size - 1, [3, 40, 17], seed=6)
    prompts = {i: [token + 1 for token in prompt] for i, prompt in prompts.items()}
    expected = {i: llama_reference.greedy(prompt, 5 + i) for i, prompt in prompts.items()}
    assert all(0 not in tokens for tokens in expected.values())

    client = new_client()
    client.pending = [new_request(i, prompt, 5 + i) for i, prompt in prompts.items()]
    make_manager(client, model_path=tmp_path, num_threads=1, model_type=V1,
                 kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=32 * 16))
    client.wait_for_finals(*prompts)
    assert {i: client.final(i).tokens()[len(prompt):] for i, prompt in prompts.items()} == expected
