"""Models that run transformers' layers on the engine's attention give transformers' logits, or are refused at load.

Models with hostile values in config.json are refused, or load without harm.
"""

import json
import random
import shutil

import pytest
import torch

from batch_manager.errors import ConfigError, ModelLoadError, UnsupportedModelError
from batch_manager.models import load_model, read_spec, register_model
from batch_manager.models.llama import Llama
from batch_manager.models.transformers import attention_function, installed, load_check
from batch_manager.models.transformers.model import TransformersModel
from batch_manager.models.transformers.proven_types import PROVEN, REFUSED
from tests.models.conftest import TINY, Driver, expected_logits, random_prompts

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Class and the fields that matter here: windows shorter than prompts, experts, one key head, scaled logits.
TYPES = [
    ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    ("Gemma2", {"sliding_window": 8, "head_dim": 16, "final_logit_softcapping": 6.0, "attn_logit_softcapping": 4.0}),
    ("Gemma3", {"sliding_window": 8, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 4}),
    ("Mixtral", {"num_local_experts": 8, "sliding_window": 8}),
    ("Qwen3Moe", EXPERTS),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": 8,
                  "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("Phimoe", {"num_local_experts": 8, "sliding_window": 8}),
    ("GraniteMoe", {"num_local_experts": 8, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("GPTBigCode", {"n_positions": 256}),
    ("Nemotron", {}),
    ("Helium", {"head_dim": 16}),
    ("Olmo3", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("Cohere2", {"sliding_window": 8, "logit_scale": 1.0}),
    ("Ernie4_5", {"head_dim": 16}),
    ("Exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    ("Glm", {"head_dim": 16}),
    ("Glm4", {"head_dim": 16}),
    ("Arcee", {}),
    ("Apertus", {}),
    ("DeepseekV3", {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                    "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                    "first_k_dense_replace": 1, "moe_intermediate_size": 48, "num_key_value_heads": 4,
                    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
                                        "mscale_all_dim": 0.7, "original_max_position_embeddings": 32}}),
    ("GptOss", {"num_local_experts": 8, "head_dim": 16, "sliding_window": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0}}),
]
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize(("family", "options"), TYPES, ids=[family for family, _ in TYPES])
def test_logits_are_those_of_transformers(reference, check_against, family, options):
    """The logits of whole prompts, of chunked prompts longer than every window, and of generated tokens are right.

    The tolerance allows for rounding on both sides: the logits of GraniteMoe, at most 2.6, differ from those in float64
    by 2e-5 in transformers and by 5e-5 here.
    """
    model, folder = reference(family, **options, **NO_IDS)
    loaded = load_model(folder, device="cpu", model_implementation="transformers")
    assert loaded.implementation == "transformers" and not loaded.deterministic
    scale = expected_logits(model, random_prompts([40]), 20).abs().max().item()
    check_against(model, Driver(loaded, shuffled=True), random_prompts([50, 23, 37]), chunk=16, tolerance=4e-5 * scale)
    check_against(model, Driver(loaded), random_prompts([1, 9]), steps=3, tolerance=4e-5 * scale)


NATIVE = [("Llama", {}), ("Mistral", {"sliding_window": 8}), ("Qwen2", {}), ("Qwen3", {"head_dim": 16}), ("GPT2", {}),
          ("Gemma2", {"sliding_window": 8, "head_dim": 16}), ("Gemma3", {"sliding_window": 8, "head_dim": 16}),
          ("Phi3", {"sliding_window": 8, "original_max_position_embeddings": 64, "rope_parameters": {
              "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5] * 4, "long_factor": [4.0] * 8,
              "original_max_position_embeddings": 64}}),
          ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
          ("StableLm", {}), ("Starcoder2", {"sliding_window": 8}), ("SmolLM3", {})]


@pytest.mark.parametrize(("family", "options"), NATIVE, ids=[family for family, _ in NATIVE])
def test_a_family_of_this_package_computes_the_same_either_way(reference, family, options):
    _, folder = reference(family, **options, **NO_IDS)
    native, other = (load_model(folder, device="cpu", model_implementation=how) for how in ("native", "transformers"))
    assert (native.implementation, other.implementation) == ("native", "transformers")
    assert load_model(folder, device="cpu").implementation == "native"
    assert [(layer.window, layer.softcap) for layer in other.spec.attention] == [
        (layer.window, layer.softcap) for layer in native.spec.attention]
    assert [layer.scale for layer in other.spec.attention] == pytest.approx([a.scale for a in native.spec.attention])
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size", "vocab_size", "architecture",
                 "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(native.spec, name) == getattr(other.spec, name), name
    prompts = random_prompts([30, 19])
    expected, found = (Driver(one).generate(prompts, 6, chunk=16) for one in (native, other))
    assert found[0] == expected[0]
    assert (found[1] - expected[1]).abs().max() < 2e-5 * expected[1].abs().max()


# ---------------------------------------------------------------------- the choice of the implementation


@pytest.fixture(scope="module")
def phimoe(reference):
    return reference("Phimoe", num_local_experts=8, **NO_IDS)[1]


@pytest.fixture(scope="module")
def mixtral(reference):
    """A checkpoint for which this package has a class, too."""
    return reference("Mixtral", num_local_experts=8, **NO_IDS)[1]


@pytest.fixture
def edited(tmp_path):
    """edited(folder, **fields) -> a copy of a checkpoint with these fields in its config.json; None removes a field"""
    def edit(folder, **fields):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        values = {**json.loads((copy / "config.json").read_text()), **fields}
        (copy / "config.json").write_text(json.dumps({name: value for name, value in values.items()
                                                      if value is not None}))
        return copy

    return edit


def refused(folder, *words, how="auto", error=ModelLoadError):
    with pytest.raises(error) as refusal:
        load_model(folder, device="cpu", model_implementation=how)
    for word in words:
        assert word in str(refusal.value), refusal.value
    assert refusal.value.expectation


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    from tests.models.conftest import make_reference

    made = {}

    def get(family, **options):
        key = repr((family, sorted(options.items())))
        if key not in made:
            model, folder = make_reference(family, **options), tmp_path_factory.mktemp(family.lower())
            model.save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return get


def test_auto_takes_transformers_where_there_is_no_class_of_this_package(phimoe):
    assert load_model(phimoe, device="cpu").implementation == "transformers"
    assert read_spec(phimoe).architecture == "PhimoeForCausalLM"
    refused(phimoe, "PhimoeForCausalLM", "LlamaForCausalLM", how="native", error=UnsupportedModelError)


def test_a_registered_class_counts_as_native(phimoe, monkeypatch):
    from batch_manager.models import registry

    monkeypatch.setattr(registry, "_models", dict(registry._models))
    register_model("PhimoeForCausalLM", Llama)
    refused(phimoe, "num_local_experts")                 # the registered class reads the file


@pytest.mark.parametrize("model_type", ["internlm3", "iquestcoder"])
def test_a_type_that_shares_another_familys_class_is_run_through_transformers(check_against, tmp_path, model_type):
    """A checkpoint with the architecture LlamaForCausalLM and a foreign model_type runs through transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**TINY, **NO_IDS, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32,
                                                          attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.implementation == "transformers"
    check_against(model, Driver(loaded), random_prompts([20, 9]))
    refused(tmp_path, "model_type", model_type, "'llama'", how="native")


def test_a_type_of_another_class_of_this_package_is_still_a_mistake(reference, edited):
    _, folder = reference("Llama", **NO_IDS)
    refused(edited(folder, model_type="mistral"), "model_type is 'mistral'", "'llama'")


def test_a_family_of_this_package_that_transformers_cannot_run_is_named_with_its_way_out(reference):
    """model_implementation="transformers" is refused for Bloom. The error says that a native class can run it."""
    _, folder = reference("Bloom", **NO_IDS)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model(folder, device="cpu", model_implementation="transformers")
    assert "not known" not in str(refusal.value) and "'bloom' does not run through transformers" in str(refusal.value)
    assert "leave model_implementation out, so that a native class runs BloomForCausalLM" in str(refusal.value)


def test_embeddings_of_another_width_than_hidden_states_are_named(reference):
    _, folder = reference("OPT", ffn_dim=96, word_embed_proj_dim=32, **NO_IDS)
    assert load_model(folder, device="cpu").implementation == "native"
    refused(folder, "the embedding of OPTForCausalLM has", "32]", "leave model_implementation out", how="transformers",
            error=UnsupportedModelError)


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_field_that_the_class_declares_with_an_underscore_is_read(reference, check_against, has_weights):
    model, folder = reference("OPT", ffn_dim=96, word_embed_proj_dim=64, _remove_final_layer_norm=True,
                              layer_norm_elementwise_affine=has_weights, **NO_IDS)
    loaded = load_model(folder, device="cpu", model_implementation="transformers")
    check_against(model, Driver(loaded), random_prompts([20, 9]))


def test_a_type_that_is_not_on_the_list_is_refused_with_both_lists(phimoe, edited):
    folder = edited(phimoe, model_type="unheard_of", architectures=["UnheardOfForCausalLM"])
    refused(folder, "unheard_of", "UnheardOfForCausalLM", "LlamaForCausalLM", "phimoe", error=UnsupportedModelError)
    refused(folder, "unheard_of", "phimoe", how="transformers", error=UnsupportedModelError)


@pytest.mark.parametrize("model_type", ["mamba", "bart", "bert", "falcon_mamba", "llama4_text", "mimo_v2_flash",
                                        "codegen", "qwen3_next"])
def test_what_does_not_run_is_refused_with_its_reason(phimoe, edited, model_type):
    folder = edited(phimoe, model_type=model_type, architectures=["OtherForCausalLM"])
    refused(folder, model_type, REFUSED[model_type], error=UnsupportedModelError)


def test_the_classes_of_this_package_are_on_the_list_too():
    from batch_manager.models.registry import _MODEL_TYPES

    types = set(_MODEL_TYPES.values())
    assert types <= PROVEN.keys() | REFUSED.keys()
    # Their attention bypasses transformers' attention interface: it has slopes, or adds a mask.
    assert types - PROVEN.keys() <= {"gptj", "bloom", "falcon", "mpt"}
    assert not PROVEN.keys() & REFUSED.keys()


def test_without_transformers_the_extra_is_named(phimoe, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(phimoe, 'pip install "batch-manager[hf]"', error=ConfigError)


def test_an_old_version_is_refused(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.0")
    with pytest.raises(ConfigError, match="4.57.0"):
        installed.transformers()


def test_a_kind_of_layer_that_was_not_tried_is_refused(edited, reference):
    _, folder = reference("Olmo3", sliding_window=8, layer_types=["sliding_attention", "full_attention",
                                                                  "sliding_attention"], **NO_IDS)
    assert "layer_types: sliding_attention" in PROVEN["olmo3"]
    folder = edited(folder, layer_types=["chunked_attention", "full_attention", "full_attention"])
    refused(folder, "layer_types: chunked_attention", "layer_types: full_attention", how="transformers",
            error=UnsupportedModelError)


# ---------------------------------------------------------------------- hostile files


@pytest.mark.parametrize(("fields", "words"), [
    ({"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}, ["auto_map"]),
    ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
    ({"is_encoder_decoder": True}, ["is_encoder_decoder"]),
    ({"per_layer_config": {"0": {"hidden_size": 3}}}, ["per_layer_config"]),
    ({"architectures": ["MixtralForSequenceClassification"]}, ["MixtralForSequenceClassification"]),
    ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "512"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
    ({"hidden_size": 2**24}, ["hidden_size"]),
    ({"vocab_size": 2**40}, ["vocab_size"]),
    ({"num_local_experts": 2**40}, ["num_local_experts"]),
    ({"num_local_experts": 2**24, "intermediate_size": 2**24}, ["config.json"]),
    ({"some_list": [[1, 2**70]]}, ["some_list"]),
    ({"hidden_size": "64"}, ["hidden_size"]),
    ({"hidden_size": 63}, ["config.json"]),
    ({"hidden_act": "os.system"}, ["config.json"]),
    ({"rope_parameters": {"rope_type": "../evil"}}, ["config.json"]),
    ({"rope_parameters": [1]}, ["config.json"]),
    ({"max_position_embeddings": 2**24 + 1}, ["max_position_embeddings"]),
    ({"max_position_embeddings": -1}, ["max_position_embeddings"]),
    ({"num_key_value_heads": 3}, ["config.json"]),
    ({"num_experts_per_tok": 9}, ["config.json"]),
    ({"dtype": "float8"}, ["dtype"]),
    ({"intermediate_size": 64}, ["experts", "shape"]),
    ({"num_hidden_layers": 2}, ["model.layers.2"]),
    ({"num_hidden_layers": 4}, ["model.layers.3"]),
    ({"tie_word_embeddings": True}, ["lm_head"]),
])
def test_a_bad_configuration_is_refused_by_name(mixtral, edited, fields, words):
    folder = edited(mixtral, **fields)
    refused(folder, *words, str(folder), how="transformers")


def test_fields_that_choose_other_code_change_nothing(phimoe, edited):
    """Fields that name kernels from a hub, remote code, other implementations or labels have no effect."""
    folder = edited(phimoe, attn_implementation="kernels-community/flash-attn", _attn_implementation="evil/evil",
                    experts_implementation="evil/evil", num_labels=2**24, output_attentions=True, return_dict=False,
                    torchscript=True, use_cache=True, _name_or_path="evil/evil", output_router_logits=True)
    plain, other = (Driver(load_model(one, device="cpu")).prefill(random_prompts([20])) for one in (phimoe, folder))
    assert torch.equal(plain, other)


NASTY = (None, 0, -1, 1, 7, 2**20, 2**24, 2**63, 1e-30, -0.5, 1e30, True, False, "", "../x", [], [[]], {}, "silu",
         ["sliding_attention"] * 3, {"rope_type": "yarn"}, {"rope_type": "longrope", "short_factor": [1]},
         {"full_attention": {"rope_type": "default"}})


@pytest.mark.parametrize("family", ["Phimoe", "GptOss", "Cohere2"])
def test_whatever_a_field_says_a_model_is_refused_or_loaded(reference, tmp_path, family):
    """A model with random hostile values in config.json loads, or is refused with a ConfigError.

    The load must not take long or need much memory.
    """
    draw = random.Random(family)
    values = json.loads((reference(family, num_local_experts=8, **NO_IDS)[1] / "config.json").read_text())
    names, ends = sorted(values.keys() - {"architectures", "model_type"}), set()
    for _ in range(40):
        changed = {draw.choice(names): draw.choice(NASTY) for _ in range(draw.randrange(1, 3))}
        (tmp_path / "config.json").write_text(json.dumps({**values, **changed}))
        try:
            load_model(tmp_path, device="cpu", load_format="dummy", free_bytes=2**28,
                       model_implementation="transformers")
            ends.add("loaded")
        except ConfigError as error:
            assert error.fact and error.expectation, changed
            ends.add("refused")
    assert ends == {"loaded", "refused"}


@pytest.mark.parametrize("set_it", [lambda: torch.set_default_dtype(torch.float64),
                                    lambda: torch.set_default_dtype(torch.bfloat16),
                                    lambda: torch.set_default_device("meta")], ids=["float64", "bfloat16", "meta"])
def test_defaults_of_the_host_change_nothing(mixtral, set_it):
    loaded = load_model(mixtral, device="cpu", model_implementation="transformers")
    expected = Driver(loaded).prefill(random_prompts([20]))
    set_it()
    try:
        loaded = load_model(mixtral, device="cpu", model_implementation="transformers")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(Driver(loaded).prefill(random_prompts([20])), expected)


def test_a_tensor_too_many_is_refused(phimoe, edited):
    from safetensors.torch import load_file, save_file

    folder = edited(phimoe)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.extra.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "model.layers.0.extra.weight")
    tensors.pop("model.layers.1.block_sparse_moe.experts.3.w1.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "model.layers.1.block_sparse_moe.experts.3.w1.weight")


def test_seeded_weights_need_config_json_alone(phimoe, tmp_path):
    shutil.copy(phimoe / "config.json", tmp_path)
    loaded = load_model(tmp_path, device="cpu", load_format="dummy", seed=3)
    again = load_model(tmp_path, device="cpu", load_format="dummy", seed=3)
    rows = [Driver(one).prefill(random_prompts([20])) for one in (loaded, again)]
    assert torch.equal(*rows) and rows[0].isfinite().all()


def test_deterministic_is_refused(phimoe):
    message = "the transformers library computes PhimoeForCausalLM.*leave deterministic out"
    with pytest.raises(ConfigError, match=message):
        load_model(phimoe, device="cpu", deterministic=True)


# ---------------------------------------------------------------------- the comparison at load


@pytest.fixture(scope="module")
def mistral(reference):
    return reference("Mistral", sliding_window=8, **NO_IDS)[1]


def break_the_window(monkeypatch):
    from batch_manager.models.transformers import discovery

    monkeypatch.setattr(discovery._Discovery, "_read", lambda *given: discovery.LayerAttention(scale=0.25))


def break_the_scale(monkeypatch):
    from batch_manager.models.transformers import discovery

    monkeypatch.setattr(discovery._Discovery, "_read",
                        lambda *given: discovery.LayerAttention(scale=0.2500001 * 1.02, window=8))


def break_the_positions(monkeypatch):
    forward = TransformersModel.forward
    monkeypatch.setattr(TransformersModel, "forward", lambda self, hidden, positions, attention: forward(
        self, hidden, torch.arange(len(positions), dtype=torch.int64, device="cpu"), attention))


def break_the_layers(monkeypatch):
    """Make all layers after the first one use the keys and values of the second layer."""
    attend = attention_function.RunningStep.attend

    def other(self, module, *given):
        self._layers = {name: (min(layer, 1), said) for name, (layer, said) in self._layers.items()}
        return attend(self, module, *given)

    monkeypatch.setattr(attention_function.RunningStep, "attend", other)


def break_the_tables(monkeypatch):
    from batch_manager.models.transformers import parameters

    monkeypatch.setattr(parameters, "_compute_buffers", lambda *given: None)


@pytest.mark.parametrize("break_it", [break_the_window, break_the_scale, break_the_positions, break_the_layers,
                                      break_the_tables])
def test_a_model_that_computes_something_else_is_refused_as_it_is_loaded(mistral, monkeypatch, break_it):
    break_it(monkeypatch)
    refused(mistral, "config.json", how="transformers", error=UnsupportedModelError)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_comparison_and_a_lost_window_does_not(mistral, monkeypatch, dtype):
    loaded = load_model(mistral, device="cpu", dtype=dtype, model_implementation="transformers")
    assert loaded.dtype == getattr(torch, dtype)
    break_the_window(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="through the engine's attention"):
        load_model(mistral, device="cpu", dtype=dtype, model_implementation="transformers")


def test_what_a_layer_says_later_must_be_what_it_said(mistral):
    loaded = load_model(mistral, device="cpu", model_implementation="transformers")
    driver = Driver(loaded)
    driver.prefill(random_prompts([20]))
    loaded.model._base.layers[1].self_attn.scaling *= 2
    with pytest.raises(Exception, match="layer 1 attends with"):
        driver.prefill(random_prompts([20]))


def test_the_comparison_crosses_small_windows(mistral, monkeypatch):
    """The check at load compares the logits of a prompt longer than the window, so that it detects a wrong window."""
    lengths = []
    reference = load_check._reference_logits
    monkeypatch.setattr(load_check, "_reference_logits", lambda model, context, prompts: lengths.extend(
        map(len, prompts)) or reference(model, context, prompts))
    load_model(mistral, device="cpu", model_implementation="transformers")
    assert max(lengths) > 8 + 16
