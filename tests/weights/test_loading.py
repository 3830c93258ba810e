"""Valid checkpoints load with the right tensors and dtype. With load_format="dummy", config.json alone suffices."""

import pytest
import torch

from batch_manager.errors import ConfigError
from batch_manager.models import load_model, registry
from batch_manager.models.registry import find_model
from batch_manager.weights.folder import CheckpointFolder
from batch_manager.weights.safetensors_source import SafetensorsWeights
from batch_manager.weights.source import DummyWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_converted_to_the_dtype_that_was_asked_for(stored, asked, checkpoint):
    checkpoint.tensors = {name: tensor.to(stored) for name, tensor in checkpoint.tensors.items()}
    weights = SafetensorsWeights(CheckpointFolder(checkpoint.write()), CPU, asked)
    assert weights.has("lm_head.weight") and not weights.has("lm_head.bias")
    for name, tensor in checkpoint.tensors.items():
        torch.testing.assert_close(weights.tensor(name, tensor.shape), tensor.to(asked), rtol=0, atol=0)
    assert weights.num_bytes == sum(t.numel() for t in checkpoint.tensors.values()) * asked.itemsize
    weights.finish()


def test_stacked_tensors_lie_below_each_other(checkpoint):
    weights = SafetensorsWeights(CheckpointFolder(checkpoint.write_shards()), CPU, torch.float32)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    stacked = weights.stacked(list(zip(names, [(8, 8), (4, 8), (4, 8)])))
    assert torch.equal(stacked, torch.cat([checkpoint.tensors[name] for name in names]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "auto", torch.bfloat16])
def test_a_model_loads_whole_and_in_shards(dtype, checkpoint):
    checkpoint.config["torch_dtype"] = "float16"
    expected = torch.float32 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    for folder in (checkpoint.write_shards(), checkpoint.write()):
        loaded = load_model(folder, device="cpu", dtype=dtype)
        assert loaded.dtype == expected
        assert loaded.weight_bytes == sum(t.numel() for t in checkpoint.tensors.values()) * expected.itemsize
        hidden = torch.zeros(2, 8, dtype=expected)
        with torch.inference_mode():
            assert loaded.model.logits(hidden).shape == (2, 11)


def test_a_tied_head_is_the_embedding_and_may_be_stored_with_it(checkpoint):
    checkpoint.config["tie_word_embeddings"] = True
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    hidden = torch.randn(3, 8)
    for stored in (True, False):
        checkpoint.tensors.pop("lm_head.weight")
        if stored:
            checkpoint.tensors["lm_head.weight"] = embedding.clone()
        loaded = load_model(checkpoint.write(), device="cpu", dtype="float32")
        with torch.inference_mode():
            torch.testing.assert_close(loaded.model.logits(hidden), hidden @ embedding.T, atol=1e-5, rtol=0)


def test_buffers_known_to_be_harmless_are_skipped(checkpoint):
    checkpoint.tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    load_model(checkpoint.write(), device="cpu")


def test_dummy_weights_need_only_the_configuration_and_follow_the_seed(checkpoint):
    checkpoint.write_config()

    def logits(**options):
        loaded = load_model(checkpoint.folder, device="cpu", load_format="dummy", **options)
        with torch.inference_mode():
            return loaded.model.logits(torch.ones(1, 8))

    assert torch.equal(logits(seed=3), logits(seed=3))
    assert not torch.equal(logits(seed=3), logits(seed=4))
    assert torch.equal(logits(), logits(seed=0))


def test_dummy_weights_do_not_depend_on_the_order_of_asking_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first = DummyWeights(7, CPU, torch.float32)
    second = DummyWeights(7, CPU, torch.float32)
    a = first.stacked([("q", (5, 3)), ("k", (2, 3))])
    assert torch.equal(a[5:], second.tensor("k", (2, 3)))
    assert torch.equal(first.tensor("norm.weight", (4,)), torch.ones(4))
    assert torch.equal(first.tensor("x.bias", (4,)), torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_loading_leaves_the_default_dtype_and_the_gradient_mode_alone(checkpoint):
    before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    load_model(checkpoint.write(), device="cpu", dtype="bfloat16")
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == before


def test_dummy_weights_are_what_every_family_asks_for(checkpoint):
    """With dummy weights, a GPT-2 loads, although its class looks up which names its tensors have.

    Its tied head has the weights of the embedding.
    """
    checkpoint.config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2,
                         "n_positions": 16}
    checkpoint.write_config()
    loaded = load_model(checkpoint.folder, device="cpu", load_format="dummy")
    with torch.inference_mode():
        assert torch.equal(loaded.model.logits(torch.eye(8)[:2]),
                           torch.nn.functional.linear(torch.eye(8)[:2], loaded.model.embedding.weight))


@pytest.mark.parametrize("options, word", [
    ({"load_format": "pickle"}, "load_format"), ({"dtype": "float64"}, "dtype"), ({"dtype": torch.int8}, "dtype"),
])
def test_an_option_that_is_not_known_is_refused_by_name(options, word, checkpoint):
    with pytest.raises(ConfigError, match=word):
        load_model(checkpoint.write(), **{"device": "cpu", **options})


def test_deterministic_is_refused_for_a_class_that_does_not_promise_it(checkpoint, monkeypatch):
    class Other(find_model("LlamaForCausalLM")):
        deterministic = False

    monkeypatch.setitem(registry._models, "LlamaForCausalLM", Other)
    with pytest.raises(ConfigError, match="Other"):
        load_model(checkpoint.write(), device="cpu", deterministic=True)


def test_an_error_that_is_not_about_memory_is_not_called_one(checkpoint, monkeypatch):
    class Broken(find_model("LlamaForCausalLM")):
        def __init__(self, spec, weights, context):
            raise RuntimeError("a bug of the class")

    monkeypatch.setitem(registry._models, "LlamaForCausalLM", Broken)
    with pytest.raises(RuntimeError, match="a bug of the class"):
        load_model(checkpoint.write(), device="cpu")
