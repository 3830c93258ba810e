"""With an FP8 KV cache, tokens are those of transformers over keys and values that its cache rounds to e4m3."""

import pytest
import torch
import transformers

from batch_manager import KvCacheConfig, TrtGptModelType
from tests.harness.client import Client
from tests.integration.conftest import VOCAB


class RoundedCache(transformers.DynamicCache):
    """A cache that rounds what it is given."""

    def update(self, key_states, value_states, *arguments, **options):
        rounded = [states.clamp(-448, 448).to(torch.float8_e4m3fn).to(states.dtype)
                   for states in (key_states, value_states)]
        return super().update(*rounded, *arguments, **options)


def expected(model, prompt, count):
    cache, ids, tokens = RoundedCache(config=model.config), torch.tensor([prompt]), []
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(ids, past_key_values=cache, use_cache=True).logits[0, -1].argmax()))
            ids = torch.tensor([tokens[-1:]])
    return tokens


@pytest.mark.parametrize("family, engine", [
    ("llama", {}), ("llama", {"cpu_compile": False}),
    *(("llama", {"enable_chunked_context": True, "max_num_tokens": 24, "deterministic": True, "cpu_compile": compiled})
      for compiled in (None, False)),
    ("gemma2", {"model_type": TrtGptModelType.InflightBatching}), ("mistral-window", {"deterministic": True}),
    ("mistral-window", {"cpu_compile": False}), ("qwen3", {"model_type": TrtGptModelType.V1})], ids=str)
def test_tokens_are_those_of_transformers_with_a_rounded_cache(make_manager, new_request, references, family, engine):
    model = references(family).model
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (1, 7, 60, 90)]
    client = Client()
    client.pending = [new_request(number, prompt, 20) for number, prompt in enumerate(prompts)]
    manager = make_manager(client, model_path=references(family).folder, num_threads=1, dtype="float32", **engine,
                           kv_cache_config=KvCacheConfig(kv_cache_dtype="fp8", max_tokens=2048, tokens_per_block=16))
    client.wait_for_finals(*range(len(prompts)))
    assert manager.info.kv_cache_dtype == "fp8_e4m3"
    assert bool(manager.info.not_compiled) == (engine.get("cpu_compile") is False)
    assert manager.shutdown()
    for number, prompt in enumerate(prompts):
        assert client.final(number).tokens()[-20:] == expected(model, prompt, 20)
