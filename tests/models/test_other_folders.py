"""Folders that differ from what transformers saves now, and that transformers reads: the same logits as transformers.

They have other names of tensors, or fields that change nothing.
"""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from batch_manager.errors import ModelLoadError
from batch_manager.models import load_model

from .conftest import Driver
from .test_same_logits_as_transformers import FAMILIES, NO_TOKENS

BASES = ("model.", "transformer.", "gpt_neox.")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
OF_EACH_FAMILY = {family: options for family, options in reversed(FAMILIES.values())}
OF_EACH_FAMILY["Mixtral"] = {**NO_TOKENS, "num_local_experts": 2}      # runs through transformers


def without_base(name):
    return next((name.removeprefix(base) for base in BASES if name.startswith(base)), name)


def under_the_head(name):
    return "lm_head.weight" if name.endswith(EMBEDDINGS) else name


@pytest.fixture
def other_folder(reference, tmp_path):
    """other_folder(family, options, renamed, **fields): a folder of the family with other names and fields.

    renamed   (name of a tensor) -> its name in the folder; None: the folder lacks it
    """
    def make(family, options, renamed=lambda name: name, **fields):
        _, folder = reference(family, **options)
        tensors = {renamed(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        tensors.pop(None, None)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | fields
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def read_by_transformers(folder):
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check(folder, check_against, prompts, **options):
    check_against(read_by_transformers(folder), Driver(load_model(folder, device="cpu", dtype="float32", **options)),
                  prompts([1, 17]), steps=3)


@pytest.mark.parametrize("family", OF_EACH_FAMILY)
def test_a_tied_base_model_under_the_name_of_its_head(family, other_folder, check_against, prompts):
    """The folder has no embedding but a head, no prefix of the base model, and names the base model's class."""
    base = {"Gemma3": "Gemma3TextModel"}.get(family, f"{family}Model")
    check(other_folder(family, {**OF_EACH_FAMILY[family], "tie_word_embeddings": True},
                       lambda name: without_base(under_the_head(name)), architectures=[base]), check_against, prompts)


@pytest.mark.parametrize(("renamed", "fields"), [
    (without_base, {}), (under_the_head, {"tie_word_embeddings": True}), (str, {"architectures": None}),
    (lambda name: name if name.endswith(EMBEDDINGS) else without_base(name), {})])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_each_other_name(renamed, fields, implementation, other_folder, check_against, prompts):
    tied = {"tie_word_embeddings": True} if fields.get("tie_word_embeddings") else {}
    check(other_folder("Llama", tied, renamed, **fields), check_against, prompts, model_implementation=implementation)


YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("fields", [
    {"rope_scaling": {**YARN, "original_max_position_embeddings": 64.0, "attn_factor": 1.0, "finetuned": True}},
    {"rope_scaling": {**YARN, "extrapolation_factor": 1, "apply_yarn_scaling": True, "mscale": None}},
    {"rope_scaling": YARN, "original_max_position_embeddings": 64.0},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 64.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, {"rope_scaling": {"type": "linear", "factor": 1}},
    {"rope_scaling": {}}, {"torch_dtype": "float", "dtype": None}, {"dtype": "half"},
    {"sliding_window": 256, "no_rope_layers": []}, {"auto_map": {}, "per_layer_config": {}},
], ids=str)
def test_fields_that_change_nothing(fields, other_folder, check_against, prompts):
    check(other_folder("Llama", {}, **{"rope_parameters": None, **fields}), check_against, prompts)


def test_longrope_ends_at_a_length_that_is_a_float(other_folder):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    folder = other_folder("Llama", {}, rope_parameters={**rope, "original_max_position_embeddings": 64.0})
    for implementation in ("native", "transformers"):
        loaded = load_model(folder, device="cpu", load_format="dummy", model_implementation=implementation)
        assert loaded.spec.max_position_embeddings == 64


@pytest.mark.parametrize(("rope", "named"), [
    ({"rope_type": "default", "factor": 8.0}, ["factor is 8.0", "'default'"]),
    ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}, ["attention_factor is 1.5", "'linear'"]),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, ["type is 'yarn'", "'linear'"]),
    ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.0}, [])])
def test_a_rotary_field_without_an_effect_is_logged(rope, named, other_folder, check_against, prompts, caplog):
    check(other_folder("Llama", {}, rope_parameters={"rope_theta": 1e4, **rope}), check_against, prompts)
    records = [record.getMessage() for record in caplog.records if record.name == "batch_manager"]
    assert len(records) == bool(named) and all(word in records[0] for word in named)


@pytest.mark.parametrize(("renamed", "fields", "there", "way_out"), [
    (lambda name: f"base_model.model.{name}", {}, "base_model.model.model.embed_tokens.weight",
     "remove 'base_model.model.' from"),
    (lambda name: None if "lm_head" in name else name, {}, "model.embed_tokens.weight", "set tie_word_embeddings"),
    (lambda name: None if "embed" in name else name, {}, "lm_head.weight", "set tie_word_embeddings"),
    (lambda name: name.replace("mlp", "ffn"), {}, "model.layers.0.ffn.gate_proj.weight", "rename the tensors"),
    (lambda name: None if name == "model.layers.2.mlp.up_proj.weight" else name, {},
     "model.layers.2.mlp.up_proj.weight", "is complete"),
    (str, {"torch_dtype": "double", "dtype": None}, "torch_dtype is 'double'", "set it to"),
    (str, {"rope_scaling": {**YARN, "attn_factor": 1.5}, "rope_parameters": None}, "attn_factor is 1.5", "without"),
    (str, {"rope_scaling": {**YARN, "original_max_position_embeddings": 64.5}}, "64.5", "a whole number"),
])
def test_what_stays_refused_names_what_is_there_and_the_way_out(renamed, fields, there, way_out, other_folder):
    with pytest.raises(ModelLoadError) as refusal:
        load_model(other_folder("Llama", {}, renamed, **fields), device="cpu")
    assert there in str(refusal.value) and way_out in str(refusal.value)


def test_an_embedding_is_read_from_a_head_only_if_the_class_ties_them(other_folder):
    """A matrix of the same shape as the head is not read from it."""
    folder = other_folder("Llama", {"intermediate_size": 97, "tie_word_embeddings": True},
                          lambda name: "lm_head.weight" if name == "model.layers.1.mlp.up_proj.weight" else name)
    with pytest.raises(ModelLoadError, match="has no tensor 'model.layers.1.mlp.up_proj.weight'"):
        load_model(folder, device="cpu")
