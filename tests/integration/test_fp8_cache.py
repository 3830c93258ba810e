"""With an FP8 KV cache, tokens are those of transformers over keys and values that its cache rounds to e4m3."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from batch_manager import KvCacheConfig, TrtGptModelType
from tests.harness.client import Client
from tests.integration.conftest import VOCAB
from tests.weights.test_quantised_folders import CACHE, write_folder


class RoundedCache(transformers.DynamicCache):
    """A cache that rounds what it is given, divided by the scales of keys and values of the layer."""

    def __init__(self, config, scales):
        super().__init__(config=config)
        self.scales = scales or [(1.0, 1.0)] * config.num_hidden_layers

    def update(self, key_states, value_states, layer, *arguments, **options):
        rounded = [(states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(states.dtype) * scale
                   for states, scale in zip((key_states, value_states), self.scales[layer])]
        return super().update(*rounded, layer, *arguments, **options)


def expected(model, prompt, count, scales=None):
    cache, ids, tokens = RoundedCache(model.config, scales), torch.tensor([prompt]), []
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


@pytest.mark.parametrize("kind", ["fp8", "auto"])
@pytest.mark.parametrize("engine", [{}, {"cpu_compile": False}], ids=str)
def test_scales_of_a_checkpoint_count_in_fp8_alone(kind, engine, make_manager, new_request, tmp_path):
    model, scales = write_folder(tmp_path, "int8 levels"), [(3.0, 20.0), (0.7, 50.0)]
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, pair in enumerate(scales):
        tensors |= {f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([scale])
                    for kind, scale in zip("kv", pair)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = CACHE
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [torch.randint(200, (length,), generator=torch.Generator().manual_seed(length)).tolist()
               for length in (3, 40)]
    client = Client()
    client.pending = [new_request(number, prompt, 20) for number, prompt in enumerate(prompts)]
    make_manager(client, model_path=tmp_path, num_threads=1, dtype="float32", **engine,
                 kv_cache_config=KvCacheConfig(kv_cache_dtype=kind, max_tokens=1024, tokens_per_block=16))
    client.wait_for_finals(*range(len(prompts)))
    found = [client.final(number).tokens()[-20:] for number in range(len(prompts))]
    plain = [model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1
                            )[0, len(prompt):].tolist() for prompt in prompts]
    scaled, unscaled = ([expected(model, prompt, 20, used) for prompt in prompts] for used in (scales, None))
    assert scaled != unscaled and scaled != plain
    assert found == (scaled if kind == "fp8" else plain)
