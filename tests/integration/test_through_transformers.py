"""Models that run through transformers' layers give the tokens of transformers, through the callbacks."""

import json
import logging

import numpy as np
import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.errors import ConfigError
from tests.integration.test_prompt_tuning import WAYS, asking, logits_of, mixture
from tests.integration.test_same_beams_as_transformers import Beams
from tests.integration.test_same_beams_as_transformers import run as run_beams
from tests.integration.test_same_tokens_as_transformers import prompts_of, run

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1
LENGTHS = [1, 2, 15, 16, 17, 40, 63, 90, 120, 5]


@pytest.mark.parametrize(("family", "options"), [
    ("mixtral-window", dict(policy=MAX, model_type=FUSED, enable_chunked_context=True, max_num_tokens=48,
                            model_implementation="transformers",
                            kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=12 * 16))),
    ("exaone4", dict(policy=GUARANTEED, model_type=SPLIT, enable_trt_overlap=True,
                     kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=90 * 16))),
    ("helium", dict(policy=GUARANTEED, model_type=V1, kv_cache_config=KvCacheConfig(tokens_per_block=32))),
    ("gpt-bigcode", dict(policy=MAX, model_type=FUSED, run_ahead=True, kv_cache_config=KvCacheConfig(max_tokens=4096))),
    ("llama-yarn-bias", dict(policy=MAX, model_type=FUSED, model_implementation="transformers",
                             kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=2048))),
    ("gemma2", dict(policy=GUARANTEED, model_type=V1, model_implementation="transformers",
                    kv_cache_config=KvCacheConfig(tokens_per_block=16))),
])
def test_a_staggered_batch_gets_the_tokens_of_transformers(make_manager, new_client, new_request, references, family,
                                                           options):
    reference = references(family)
    prompts = prompts_of(reference.vocab_size, LENGTHS)
    records = run(make_manager, new_client, new_request, reference, prompts, lambda i: 20 + 2 * i, **options)
    if "max_num_tokens" in options:
        assert sum(record["Paused Requests"] for record in records) > 0


def test_prompts_begin_behind_what_is_cached(make_manager, new_client, new_request, references):
    reference, client = references("exaone4"), new_client()
    common, *ends = prompts_of(reference.vocab_size, [40, 9, 1, 20], seed=5).values()
    manager = make_manager(client, model_path=reference.folder, num_threads=1, kv_cache_config=KvCacheConfig(
        tokens_per_block=8, max_tokens=1024, enable_block_reuse=True))
    assert manager.info.model_implementation == "transformers"
    for i, end in enumerate(ends):
        client.pending.append(new_request(i, common + end, 10))
        client.wait_for_finals(i)
        generated = client.final(i).tokens()[len(common + end):]
        assert generated == reference.greedy(common + end, 10, guess=generated)
    assert manager.shutdown()
    assert sum(json.loads(record)["Reused KV cache blocks"] for record in client.stats) >= 2 * (40 // 8)


def test_beams_are_those_of_transformers(make_manager, new_client, new_request, references):
    reference = references("mixtral-window")
    model = Beams(reference.model, reference.folder)
    prompts = prompts_of(reference.vocab_size, [3, 17, 60], seed=2)
    asked = {i: (prompt, 12, width, 7, 1.0, 0) for (i, prompt), width in zip(prompts.items(), (2, 4, 3))}
    run_beams(make_manager, new_client(), new_request, model, asked, max_batch_size=8,
              model_implementation="transformers",
              kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=2048))


@pytest.mark.parametrize("family", ["granite", "gemma2"])       # granite scales embeddings in `forward`, gemma2 before
def test_virtual_tokens_are_what_transformers_takes_as_embeddings(make_manager, new_client, references, family):
    reference, requests, client = references(family), mixture(), new_client()
    client.pending = [asking(i, prompt, table) for i, (prompt, table) in requests.items()]
    manager = make_manager(client, model_path=reference.folder, num_threads=1, model_implementation="transformers",
                           **WAYS["split, in chunks, paused"])
    client.wait_for_finals(*requests)
    assert manager.shutdown()
    for i, (prompt, table) in requests.items():
        assert client.final(i).error == ""
        text, found = client.final(i).tokens(), client.final(i).tensors["context_logits"][0]
        np.testing.assert_allclose(found, logits_of(reference.model, text, table)[: len(prompt)], atol=1e-4, rtol=0)


def test_its_steps_are_not_compiled_and_the_log_says_who_computes(make_manager, new_client, references, caplog):
    reference = references("helium")
    with pytest.raises(ConfigError, match="cpu_compile is True, but TransformersModel cannot be compiled"):
        make_manager(new_client(), model_path=reference.folder, cpu_compile=True)
    with caplog.at_level(logging.INFO, logger="batch_manager"):
        manager = make_manager(new_client(), model_path=reference.folder)
    assert manager.shutdown()
    assert "transformers model HeliumForCausalLM" in caplog.text
    assert "TransformersModel cannot be compiled" in caplog.text
    manager = make_manager(new_client(), model_path=references("llama").folder)
    assert manager.info.model_implementation == "native"
    assert manager.shutdown()
