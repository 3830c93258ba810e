"""Errors in a user's model class, or in the spec that it reads, name the class and the attribute, not config.json."""

import dataclasses
import json

import pytest
import torch

from batch_manager.attention.interface import LayerAttention
from batch_manager.errors import ConfigError, ModelLoadError
from batch_manager.layers.mlp import GatedMlp, Mlp
from batch_manager.layers.rotary import Rotary
from batch_manager.models import read_spec, register_model, registry
from batch_manager.models.registry import find_model

DECODER = {"architectures": ["MyForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112,
           "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
Llama = find_model("LlamaForCausalLM")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_models", dict(registry._models))


@pytest.fixture
def registered(tmp_path):
    """registered(fields={}, **members): registers a subclass of Llama with these class attributes. Returns its spec.

    fields   fields of the config.json that the class reads
    """

    def read(fields=(), **members):
        register_model("MyForCausalLM", type("Mine", (Llama,), members))
        (tmp_path / "config.json").write_text(json.dumps({**DECODER, **dict(fields)}))
        return read_spec(tmp_path)

    return read


def reads(**changes):
    """Return a static method `read_spec` that reads Llama's spec and replaces these attributes of it."""
    return staticmethod(lambda *given: dataclasses.replace(Llama.read_spec(*given), **changes))


def parts_of(error):
    text = str(error.value)
    assert len(text.split("; ")) in (2, 3), text
    return text


@pytest.mark.parametrize("members, told", [
    ({"understands": None}, "Mine.understands is None; expected a tuple of strings: field names"),
    ({"understands": "sliding_window"}, "Mine.understands is 'sliding_window'"),
    ({"understands": (1,)}, r"Mine.understands is \(1,\)"),
    ({"harmless_tensors": None}, "Mine has no harmless_tensors"),
    ({"harmless_tensors": "model.norm"}, "Mine.harmless_tensors is 'model.norm'; "
                                         "expected a tuple of strings: patterns"),
    ({"harmless_tensors": ("(",)}, r"Mine.harmless_tensors contains '\(', which is not valid .*; expected regular"),
    ({"deterministic": 1}, "Mine.deterministic is 1; expected True or False"),
    ({"deterministic": "no"}, "Mine.deterministic is 'no'"),
    ({"embed": 5}, "Mine.embed is 5; expected a method"),
    ({"read_spec": 5}, "Mine.read_spec is 5; expected a method"),
    ({"logits": None, "forward": None}, "Mine has no forward, logits"),
    ({"read_spec": lambda self, config, architecture: None},
     r"Mine.read_spec takes \(self, config, architecture\); .*static method"),
])
def test_a_class_that_is_none_of_ours_is_not_registered(members, told, registered):
    with pytest.raises(ConfigError, match=told) as error:
        registered(**members)
    assert "config.json" not in parts_of(error) and "MyForCausalLM" not in registry._models


@pytest.mark.parametrize("given", [object.__new__(Llama), None, "Llama", lambda spec, weights, context: None])
def test_an_object_in_the_place_of_a_class_is_not_registered(given):
    with pytest.raises(ConfigError, match=f"register_model got an object of type {type(given).__name__}; "
                                          "expected a class"):
        register_model("MyForCausalLM", given)


@pytest.mark.parametrize("name", ["", None, 5])
def test_an_architecture_without_a_name_is_not_registered(name):
    with pytest.raises(ConfigError, match=f"the architecture is {name!r}; expected a name"):
        register_model(name, Llama)


def test_a_list_of_names_and_a_class_method_do():
    class Mine(Llama):
        understands, harmless_tensors = ["clip_qkv"], {"model.norm.bias"}

        @classmethod
        def read_spec(cls, config, architecture):
            return Llama.read_spec(config, architecture)

    register_model("MyForCausalLM", Mine)
    assert find_model("MyForCausalLM") is Mine


@pytest.mark.parametrize("changes, expectation", [
    *(({field: value}, "an integer above 0") for value in (0, -4, 2.0, True, None) for field in (
        "num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size", "intermediate_size", "vocab_size",
        "max_position_embeddings")),
    ({"attention": (None,) * 4}, "a tuple of LayerAttention"), ({"attention": None}, "a tuple of LayerAttention"),
    ({"norm_epsilon": 0.0}, "a finite number above 0"), ({"norm_epsilon": float("inf")}, "a finite number above 0"),
    ({"norm_epsilon": "small"}, "a finite number above 0"), ({"activation": None}, "the name of an activation"),
    ({"rotary": 10000.0}, "RotaryParameters, or None"), ({"rotary_size": 3}, "an even integer from 2 to"),
    ({"rotary_size": 18}, "an even integer from 2 to"), ({"rotary_size": 0}, "an even integer from 2 to"),
    ({"dtype": "int8"}, "one of float32, float16, bfloat16"), ({"dtype": torch.float32}, "one of float32"),
    ({"tie_word_embeddings": 1}, "True or False"), ({"qkv_bias": None}, "True or False"),
    ({"num_kv_heads": 3}, "a divisor of num_attention_heads, 4"), ({"head_size": 7}, "an even number"),
    ({"max_position_embeddings": 2**24, "head_size": 2**10}, "at most"),
], ids=repr)
def test_a_spec_that_cannot_be_names_the_class_and_the_field(changes, expectation, registered):
    with pytest.raises(ConfigError, match=f"Mine.read_spec returned a spec whose {next(iter(changes))} is .*; "
                       f".*{expectation}") as error:
        registered(read_spec=reads(**changes))
    assert not isinstance(error.value, ModelLoadError) and "config.json" not in parts_of(error)


def test_slopes_for_another_number_of_heads_name_the_layer(registered):
    layers = tuple(LayerAttention(scale=1.0, alibi_slopes=(0.5,) * count) for count in (4, 3, 4, 4))
    with pytest.raises(ConfigError, match="a spec with 4 heads and 3 alibi_slopes in layer 1; "
                                          "expected one slope for each"):
        registered(read_spec=reads(attention=layers))


@pytest.mark.parametrize("fields, told", [
    ({"num_key_value_heads": 3}, "config.json: num_key_value_heads is 3"),
    ({"head_dim": 7}, "config.json: the head size is 7"),
    ({"hidden_size": 60}, "config.json: the head size is 15"),
    ({"max_position_embeddings": 2**24}, "config.json: max_position_embeddings is 16,777,216"),
])
def test_what_the_file_says_wrong_is_the_files_fault(fields, told, registered):
    with pytest.raises(ModelLoadError, match=told):
        registered(fields)


def test_a_layer_that_is_given_what_no_spec_should_have_says_so():
    for layer in (GatedMlp, Mlp):
        with pytest.raises(ConfigError, match=f"{layer.__name__} .*has the activation 'tanh'; expected one of silu, "):
            layer(None, None, *("a", "b")[:1 if layer is GatedMlp else 2], 8, 8, "tanh")
    with pytest.raises(ConfigError, match="Rotary got None for parameters; expected the RotaryParameters"):
        Rotary(None, None, 8, 8)
