"""A config.json in the form of transformers 4 and one in the form of transformers 5 give the same ModelSpec.

A field that would change the logits, and that the reader does not understand, is refused by name.
"""

import json

import pytest
import torch

from batch_manager.errors import ModelLoadError, UnsupportedModelError
from batch_manager.layers.rotary import RotaryParameters, inverse_frequencies
from batch_manager.models import load_model, read_spec, register_model
from batch_manager.models.registry import _models, find_model
from batch_manager.models.spec_reading import layer_count, read_decoder_spec
from batch_manager.weights.source import DummyWeights

DECODER = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
BASE = {
    "LlamaForCausalLM": DECODER, "MistralForCausalLM": DECODER, "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER, "GemmaForCausalLM": DECODER, "Gemma2ForCausalLM": DECODER,
    "Gemma3ForCausalLM": DECODER,
    "GPT2LMHeadModel": {"vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256},
}
# test_config_differential.py compares their defaults with transformers.
OTHERS = {
    **dict.fromkeys(("Olmo2ForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM",
                     "Starcoder2ForCausalLM", "PhiForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM",
                     "GraniteForCausalLM", "Olmo3ForCausalLM"), DECODER),
    **dict.fromkeys(("MixtralForCausalLM", "GraniteMoeForCausalLM"), {**DECODER, "num_local_experts": 4}),
    **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"), {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "GPTNeoXForCausalLM": {name: value for name, value in DECODER.items() if name != "num_key_value_heads"},
    "GPTJForCausalLM": {"vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "OPTForCausalLM": {"vocab_size": 97, "hidden_size": 64, "ffn_dim": 112, "num_hidden_layers": 4,
                       "num_attention_heads": 4, "max_position_embeddings": 256},
    "BloomForCausalLM": {"vocab_size": 97, "hidden_size": 64, "n_layer": 4, "n_head": 4},
    "FalconForCausalLM": {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
}


def windows_of(spec):
    return tuple(layer.window for layer in spec.attention)


@pytest.fixture
def spec_of(tmp_path):
    def read(architecture, **fields):
        config = {"architectures": [architecture], **(BASE | OTHERS).get(architecture, DECODER), **fields}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
        return read_spec(tmp_path)

    return read


@pytest.mark.parametrize("architecture", BASE)
def test_defaults_fill_what_a_configuration_leaves_out(architecture, spec_of):
    spec = spec_of(architecture)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_position_embeddings) == (4, 64, 97, 256)
    is_gemma = architecture.startswith("Gemma")
    assert spec.head_size == (256 if is_gemma else 128 if architecture.startswith("Qwen3") else 16)
    assert spec.num_kv_heads == (4 if architecture.startswith("GPT2") else 2)
    assert spec.tie_word_embeddings is (is_gemma or architecture.startswith("GPT2"))
    windows = {"MistralForCausalLM": (4096,) * 4, "Gemma2ForCausalLM": (4096, None) * 2,
               "Gemma3ForCausalLM": (4096,) * 4}
    assert windows_of(spec) == windows.get(architecture, (None,) * 4)
    assert spec.qkv_bias is (architecture in ("Qwen2ForCausalLM", "GPT2LMHeadModel"))
    assert spec.dtype is None


@pytest.mark.parametrize("fields, expected", [
    ({"rope_theta": 5e5}, RotaryParameters(theta=5e5)),
    ({"rope_theta": 500000, "rope_scaling": None}, RotaryParameters(theta=5e5)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RotaryParameters(theta=5e5)),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
     RotaryParameters(kind="linear", theta=5e5, factor=2.0)),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
     RotaryParameters(kind="linear", theta=5e5, factor=2.0)),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
     RotaryParameters(kind="llama3", theta=5e5, factor=8.0, original_max_positions=64)),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
     RotaryParameters(kind="yarn", theta=5e5, factor=4.0, original_max_positions=256, amplitude=1.5)),
    ({"original_max_position_embeddings": 32, "rope_parameters": {"rope_type": "yarn", "factor": 1.0}},
     RotaryParameters(kind="yarn", factor=1.0, original_max_positions=32)),
])
def test_rotary_parameters_of_both_generations_of_configurations(fields, expected, spec_of):
    assert spec_of("LlamaForCausalLM", **fields).rotary == expected


def test_quantised_weights_are_refused_by_name(spec_of):
    with pytest.raises(ModelLoadError, match="quantization_config: quant_method is 'hqq'; expected one of gptq"):
        spec_of("LlamaForCausalLM", quantization_config={"quant_method": "hqq"})


def test_yarn_needs_its_factor_as_in_transformers(spec_of):
    with pytest.raises(ModelLoadError, match="rope_scaling: factor is missing"):
        spec_of("LlamaForCausalLM", rope_scaling={"type": "yarn", "original_max_position_embeddings": 32})


@pytest.mark.parametrize("fields, expected", [
    ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({"dtype": None}, None),
    ({"torch_dtype": "torch.float32"}, "float32"), ({"torch_dtype": "auto"}, None),
])
def test_the_dtype_under_its_old_and_new_name(fields, expected, spec_of):
    assert spec_of("LlamaForCausalLM", **fields).dtype == expected


@pytest.mark.parametrize("architecture, fields, windows", [
    ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
    ("MistralForCausalLM", {"sliding_window": 33}, (33,) * 4),
    ("Qwen2ForCausalLM", {"sliding_window": 33, "use_sliding_window": False, "max_window_layers": 1}, (None,) * 4),
    ("Qwen2ForCausalLM", {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 1},
     (None, 33, 33, 33)),
    ("Qwen3ForCausalLM", {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 28}, (None,) * 4),
    ("Qwen3ForCausalLM", {"sliding_window": 33, "use_sliding_window": True,
                          "layer_types": ["sliding_attention", "full_attention"] * 2}, (33, None) * 2),
    ("Qwen2ForCausalLM", {"sliding_window": None, "use_sliding_window": False,
                          "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ("LlamaForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, (None,) * 4),
    ("Qwen2ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None,) * 4),
    ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, (None,) * 4),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, (None,) * 3 + (4096,)),
    ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3, "layer_types": None},
     (None,) * 3 + (4096,)),
])
def test_windows_per_layer(architecture, fields, windows, spec_of):
    assert windows_of(spec_of(architecture, **fields)) == windows


@pytest.mark.parametrize("architecture, fields, num_kv_heads", [
    ("LlamaForCausalLM", {"num_key_value_heads": "absent"}, 4),
    ("MistralForCausalLM", {"num_key_value_heads": "absent", "num_attention_heads": 16}, 8),
    ("MistralForCausalLM", {"num_key_value_heads": None}, 4),
    ("Qwen2ForCausalLM", {"num_key_value_heads": "absent", "num_attention_heads": 64, "head_dim": 8}, 32),
    ("Qwen2ForCausalLM", {"num_key_value_heads": None}, 4),
    ("Qwen3ForCausalLM", {"num_key_value_heads": "absent", "num_attention_heads": 64}, 32),
])
def test_heads_of_keys_and_values_that_are_left_out_are_the_family_s_default(
        architecture, fields, num_kv_heads, spec_of):
    assert spec_of(architecture, **fields).num_kv_heads == num_kv_heads


def test_a_default_that_does_not_divide_the_heads_is_named_with_its_value(spec_of):
    with pytest.raises(ModelLoadError, match="num_key_value_heads is 8, the default.*a divisor.*, 4"):
        spec_of("MistralForCausalLM", num_key_value_heads="absent")


def test_an_alias_of_gpt2_comes_before_the_first_name(spec_of):
    spec = spec_of("GPT2LMHeadModel", num_attention_heads=2, num_hidden_layers=3, max_position_embeddings=77,
                   hidden_size=32)
    assert (spec.num_heads, spec.num_layers, spec.max_position_embeddings, spec.hidden_size) == (2, 3, 77, 32)
    assert (spec.head_size, spec.intermediate_size) == (16, 128)
    spec = spec_of("GPT2LMHeadModel", num_attention_heads=2, n_head="absent", num_hidden_layers=None)
    assert (spec.num_heads, spec.num_layers) == (2, 4)


@pytest.mark.parametrize("model_type", ["llama", None, "absent"])
def test_a_model_type_that_agrees_or_is_not_given(model_type, spec_of):
    assert spec_of("LlamaForCausalLM", model_type=model_type).num_layers == 4


@pytest.mark.parametrize("architecture, model_type", [
    ("MistralForCausalLM", "llama"), ("LlamaForCausalLM", "mistral"), ("Qwen2ForCausalLM", "qwen3"),
    ("Qwen3ForCausalLM", "Qwen3"), ("GPT2LMHeadModel", "gpt_neo"),
])
def test_a_model_type_that_contradicts_the_architecture_is_refused_naming_both(architecture, model_type, spec_of):
    with pytest.raises(ModelLoadError) as refusal:
        spec_of(architecture, model_type=model_type)
    for name in ("model_type", repr(model_type), "architectures", architecture):
        assert name in str(refusal.value)


def test_null_means_not_given(spec_of):
    spec = spec_of("LlamaForCausalLM", head_dim=None, num_key_value_heads=None, rms_norm_eps=None)
    assert (spec.head_size, spec.num_kv_heads, spec.norm_epsilon) == (16, 4, 1e-6)


@pytest.mark.parametrize("fields, named", [
    ({"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads is 3; expected a divisor"),
    ({"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2; expected num_attention_heads, 4"),
    ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is False"),
    ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3; expected 1 or 2"),
    ({"alibi": True, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
])
def test_falcon_refuses_what_its_three_layouts_do_not_have(fields, named, spec_of):
    with pytest.raises(ModelLoadError, match=named):
        spec_of("FalconForCausalLM", **fields)


def test_slopes_of_falcon_are_numbers_of_bfloat16(spec_of):
    spec = spec_of("FalconForCausalLM", alibi=True, num_attention_heads=8)
    slopes = torch.tensor(spec.attention[0].alibi_slopes)
    assert torch.equal(slopes.bfloat16().float(), slopes) and spec.rotary is None
    assert spec.attention[0].alibi_bfloat16_factor == spec.attention[0].scale == 8**-0.5


REFUSED = [
    ("LlamaForCausalLM", "quantization_config", {"quant_method": "gptq"}),
    ("LlamaForCausalLM", "auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
    ("LlamaForCausalLM", "auto_map", {"AutoModelForCausalLM": ["modeling_x.LlamaForCausalLM"]}),
    ("LlamaForCausalLM", "auto_map", "modeling_x.LlamaForCausalLM"),
    ("LlamaForCausalLM", "auto_map", {"AutoConfig": "configuration_x.X"}),
    ("LlamaForCausalLM", "partial_rotary_factor", 0.5),
    ("LlamaForCausalLM", "final_logit_softcapping", 30.0),
    ("LlamaForCausalLM", "num_local_experts", 8),
    ("LlamaForCausalLM", "sliding_window", 255),
    ("LlamaForCausalLM", "layer_types", ["sliding_attention"] * 4),
    ("LlamaForCausalLM", "hidden_act", "quick_gelu"),
    ("LlamaForCausalLM", "hidden_size", -64),
    ("LlamaForCausalLM", "hidden_size", 2**70),
    ("LlamaForCausalLM", "hidden_size", "64"),
    ("LlamaForCausalLM", "hidden_size", True),
    ("LlamaForCausalLM", "hidden_size", 64.0),
    ("LlamaForCausalLM", "hidden_size", [64]),
    ("LlamaForCausalLM", "hidden_size", "absent"),
    ("LlamaForCausalLM", "hidden_size", 66),
    ("LlamaForCausalLM", "num_hidden_layers", 0),
    ("LlamaForCausalLM", "num_hidden_layers", 10**6),
    ("LlamaForCausalLM", "num_key_value_heads", 3),
    ("LlamaForCausalLM", "num_key_value_heads", 8),
    ("LlamaForCausalLM", "vocab_size", 10**12),
    ("LlamaForCausalLM", "max_position_embeddings", 10**15),
    ("LlamaForCausalLM", "rms_norm_eps", 0.0),
    ("LlamaForCausalLM", "rms_norm_eps", 10**400),
    ("LlamaForCausalLM", "tie_word_embeddings", 1),
    ("LlamaForCausalLM", "dtype", "float8_e4m3fn"),
    ("LlamaForCausalLM", "torch_dtype", 16),
    ("LlamaForCausalLM", "rope_scaling", {"type": "proportional", "factor": 2.0}),
    ("LlamaForCausalLM", "rope_scaling", {"type": "dynamic"}),
    ("LlamaForCausalLM", "rope_scaling", {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}),
    ("LlamaForCausalLM", "rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("LlamaForCausalLM", "rope_scaling", {"type": "linear"}),
    ("LlamaForCausalLM", "rope_scaling", {"type": "linear", "factor": -1}),
    ("LlamaForCausalLM", "rope_scaling", {"type": "default", "mrope_section": [8, 4, 4]}),
    ("LlamaForCausalLM", "rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                                          "high_freq_factor": 4.0}),
    ("LlamaForCausalLM", "rope_scaling", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}),
    ("LlamaForCausalLM", "rope_scaling", ["linear", 2.0]),
    ("LlamaForCausalLM", "rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("LlamaForCausalLM", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("LlamaForCausalLM", "rope_theta", "10000"),
    ("LlamaForCausalLM", "architectures", "LlamaForCausalLM"),
    ("LlamaForCausalLM", "architectures", []),
    ("LlamaForCausalLM", "architectures", [1]),
    ("LlamaForCausalLM", "layer_types", ["full_attention"] * 3),
    ("LlamaForCausalLM", "layer_types", []),
    ("MistralForCausalLM", "layer_types", ["sliding_attention"] * 5),
    ("GPT2LMHeadModel", "layer_types", ["full_attention"] * 5),
    ("GPT2LMHeadModel", "rope_scaling", {"type": "yarn", "factor": 4.0}),
    ("GPT2LMHeadModel", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ("LlamaForCausalLM", "per_layer_config", {"0": {"num_key_value_heads": 4}}),
    ("GPT2LMHeadModel", "per_layer_config", {"1": {}}),
    ("Qwen2ForCausalLM", "per_layer_config", []),
    ("LlamaForCausalLM", "use_bidirectional_attention", True),
    ("LlamaForCausalLM", "model_type", 7),
    ("GPT2LMHeadModel", "num_attention_heads", 3.0),
    ("GPT2LMHeadModel", "hidden_size", 65),
    ("MistralForCausalLM", "sliding_window", 0),
    ("MistralForCausalLM", "layer_types", ["full_attention"] * 4),
    ("Qwen2ForCausalLM", "layer_types", ["sliding_attention"] * 4),
    ("Qwen2ForCausalLM", "layer_types", ["full_attention"] * 3),
    ("Qwen2ForCausalLM", "layer_types", ["linear_attention"] * 4),
    ("Qwen2ForCausalLM", "use_mrope", True),
    ("GPT2LMHeadModel", "scale_attn_weights", False),
    ("GPT2LMHeadModel", "scale_attn_by_inverse_layer_idx", True),
    ("GPT2LMHeadModel", "reorder_and_upcast_attn", True),
    ("GPT2LMHeadModel", "add_cross_attention", True),
    ("GPT2LMHeadModel", "activation_function", "tanh"),
    ("GPT2LMHeadModel", "n_embd", 65),
    ("Olmo2ForCausalLM", "sliding_window", 7),
    ("OPTForCausalLM", "ffn_dim", "absent"),
    ("OPTForCausalLM", "word_embed_proj_dim", 0),
    ("OPTForCausalLM", "do_layer_norm_before", 1),
    ("OPTForCausalLM", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("FalconForCausalLM", "num_hidden_layers", "absent"),
    ("FalconForCausalLM", "n_embed", 32),
    ("FalconForCausalLM", "head_dim", 16),
    ("FalconForCausalLM", "num_ln_in_parallel_attn", 2),
    ("FalconForCausalLM", "ffn_hidden_size", 0),
    ("FalconForCausalLM", "activation", "tanh"),
    ("FalconForCausalLM", "alibi", "yes"),
    ("FalconForCausalLM", "apply_residual_connection_post_layernorm", True),
    ("FalconForCausalLM", "rope_scaling", {"type": "ntk", "factor": 2.0}),
    ("FalconForCausalLM", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("BloomForCausalLM", "alibi", False),
    ("BloomForCausalLM", "n_embed", 32),
    ("BloomForCausalLM", "num_hidden_layers", 5),
    ("BloomForCausalLM", "n_head", 0),
    ("BloomForCausalLM", "hidden_size", 65),
    ("BloomForCausalLM", "sliding_window", 7),
    ("BloomForCausalLM", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("BloomForCausalLM", "apply_residual_connection_post_layernorm", 1),
    ("Cohere2ForCausalLM", "head_dim", 32),
    ("Cohere2ForCausalLM", "sliding_window", None),
    ("GraniteForCausalLM", "residual_multiplier", 0),
    ("GraniteForCausalLM", "logits_scaling", "8"),
    ("CohereForCausalLM", "logit_scale", None),
    ("GPTJForCausalLM", "rotary_dim", None),
    ("GPTJForCausalLM", "rotary_dim", 7),
    ("GPTJForCausalLM", "rotary_dim", 32),
    ("GPTJForCausalLM", "hidden_size", 64),
    ("PhiForCausalLM", "sliding_window", 7),
    ("StableLmForCausalLM", "head_dim", 32),
    ("StableLmForCausalLM", "sliding_window", 7),
    ("SmolLM3ForCausalLM", "no_rope_layers", [1, 1, 1]),
    ("SmolLM3ForCausalLM", "layer_types", ["sliding_attention"] * 4),
    ("Starcoder2ForCausalLM", "layer_types", ["sliding_attention"] * 4),
    ("Gemma3ForCausalLM", "rope_scaling", {"rope_type": "yarn", "factor": 8.0, "truncate": False}),
    ("Phi3ForCausalLM", "rope_parameters", {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}),
    ("GPTNeoXForCausalLM", "head_dim", 32),
    ("Phi3ForCausalLM", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("Phi3ForCausalLM", "rope_scaling", {"type": "yarn", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}),
    ("LlamaForCausalLM", "rope_scaling", {**LONGROPE, "short_factor": [1.0] * 7}),
    ("LlamaForCausalLM", "rope_scaling", {**LONGROPE, "short_factor": [0] * 8}),
    ("LlamaForCausalLM", "rope_scaling", {**LONGROPE, "long_factor": None}),
    ("GemmaForCausalLM", "sliding_window", 7),
    ("GemmaForCausalLM", "attn_logit_softcapping", 50.0),
    ("GemmaForCausalLM", "use_bidirectional_attention", True),
    ("Gemma2ForCausalLM", "layer_types", ["full_attention"] * 3),
    ("Gemma2ForCausalLM", "layer_types", ["chunked_attention"] * 4),
    ("Gemma2ForCausalLM", "sliding_window", None),
    ("Gemma2ForCausalLM", "attn_logit_softcapping", 0),
    ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
    ("Gemma3ForCausalLM", "rope_parameters", {"rope_type": "linear", "factor": 8.0}),
    ("Gemma3ForCausalLM", "rope_scaling", {"type": "linear", "factor": 8.0}),
    ("Gemma3ForCausalLM", "sliding_window_pattern", 0),
]


@pytest.mark.parametrize("architecture, field, value", REFUSED)
def test_what_is_not_implemented_or_not_sane_is_refused_by_name(architecture, field, value, spec_of, tmp_path):
    with pytest.raises(ModelLoadError) as refusal:
        spec_of(architecture, **{field: value})
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert field in str(refusal.value)


def test_longrope_is_read_up_to_the_positions_before_stretching(spec_of):
    factors = {"short_factor": [1.0, 1.5] * 4, "long_factor": [4.0] * 8}
    spec = spec_of("Phi3ForCausalLM", max_position_embeddings=131072, original_max_position_embeddings=4096,
                   rope_scaling={"type": "su", **factors})
    assert spec.max_position_embeddings == 4096 and spec.rotary.short_factors == (1.0, 1.5) * 4
    assert spec.rotary.amplitude == pytest.approx((1 + 5 / 12)**0.5)      # log(32) / log(4096)
    plain = inverse_frequencies(RotaryParameters(), 16)
    torch.testing.assert_close(inverse_frequencies(spec.rotary, 16), plain / torch.tensor([1.0, 1.5] * 4))


def test_the_first_gemmas_say_gelu_and_mean_the_tanh_one(spec_of):
    for given, expected in (("gelu", "gelu_new"), ("gelu_pytorch_tanh", "gelu_new"), ("gelu_python", "gelu"),
                            ("absent", "gelu_new"), ("silu", "silu")):
        assert spec_of("GemmaForCausalLM", hidden_act=given).activation == expected


def test_gemma_2_has_defaults_where_a_field_is_absent_and_nothing_where_it_is_null(spec_of):
    spec = spec_of("Gemma2ForCausalLM")
    assert windows_of(spec) == (4096, None, 4096, None) and spec.logits_softcap == 30.0
    assert {(layer.scale, layer.softcap) for layer in spec.attention} == {(256**-0.5, 50.0)}
    spec = spec_of("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert spec.logits_softcap is None and {layer.softcap for layer in spec.attention} == {None}


def test_a_gemma_3_of_older_files_has_a_table_of_its_own_for_the_layers_that_slide(spec_of):
    spec = spec_of("Gemma3ForCausalLM", num_hidden_layers=7, rope_theta=1e6, rope_local_base_freq=1e4,
                   rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window=512, sliding_window_pattern=6)
    assert spec.rotary == RotaryParameters(kind="linear", theta=1e6, factor=8.0)
    assert spec.sliding_rotary == RotaryParameters(theta=1e4)
    assert windows_of(spec) == (*[512] * 5, None, 512) and spec.slides == (*[True] * 5, False, True)
    with pytest.raises(ModelLoadError, match="rope_scaling is .*null, because the file has rope_parameters"):
        spec_of("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0},
                rope_parameters={"full_attention": {"rope_type": "default"}})


def test_a_composite_model_is_refused_with_the_kind_of_its_text_part(spec_of):
    with pytest.raises(UnsupportedModelError, match="'Gemma3ForConditionalGeneration' combines a text model of type "
                       "'gemma3_text' with another model; .*AutoModelForCausalLM"):
        spec_of("Gemma3ForConditionalGeneration", text_config={"model_type": "gemma3_text"}, vision_config={})
    with pytest.raises(UnsupportedModelError, match="combines a text model with another model"):
        spec_of("OddForConditionalGeneration", text_config={"model_type": 3})
    with pytest.raises(UnsupportedModelError, match="is not known"):
        spec_of("OddForConditionalGeneration", text_config={})


def test_layers_that_slide_without_a_window_are_refused(spec_of):
    with pytest.raises(ModelLoadError, match="sliding_window is null.*layer_types"):
        spec_of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=None,
                layer_types=["sliding_attention"] * 4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", [*BASE, *OTHERS])
def test_the_number_of_weights_is_that_of_the_matrices_a_model_asks_for(
        architecture, tied, spec_of, tmp_path, monkeypatch):
    asked_for, fill = [], DummyWeights._fill
    monkeypatch.setattr(DummyWeights, "_fill", lambda weights, name, rows: (
        asked_for.append(rows.numel() if rows.dim() > 1 else 0), fill(weights, name, rows)))
    spec = spec_of(architecture, tie_word_embeddings=tied)
    load_model(tmp_path, device="cpu", load_format="dummy")
    assert spec.num_weights == sum(asked_for)


def test_an_unknown_architecture_lists_the_known_ones_and_the_way_to_add_one(spec_of):
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM.*register_model"):
        spec_of("NewForCausalLM")


class Plain:
    """A user's model class that reads its spec with `read_decoder_spec` and understands no additional fields."""

    harmless_tensors = ()
    options: dict = {}

    @classmethod
    def read_spec(cls, config, architecture):
        return read_decoder_spec(config, architecture, windows=(None,) * layer_count(config), max_positions=2048,
                                 **cls.options)

    def embed(self, token_ids):
        raise NotImplementedError

    forward = logits = embed


NEEDED = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}


@pytest.fixture
def registered_spec_of(spec_of, monkeypatch):
    """registered_spec_of(members={...}, **fields) -> the ModelSpec that a user's model class reads from a config.json

    members   class attributes that are added to `Plain`
    fields    fields of the config.json
    """

    def read(*, without=(), members=None, **fields):
        monkeypatch.setattr("batch_manager.models.registry._models", dict(_models))
        register_model("MyForCausalLM", type("Mine", (Plain,), members or {}))
        return spec_of("MyForCausalLM", **{k: v for k, v in NEEDED.items() if k not in without}, **fields)

    return read


@pytest.mark.parametrize("name, value", {
    "sliding_window": 8, "use_sliding_window": False, "layer_types": ["full_attention"] * 4, "text_config": {"a": 1},
    "attn_logit_softcapping": 50.0, "alibi": True, "hidden_activation": "silu", "rotary_emb_base": 1e4, "causal": True,
    "a_field_of_next_year": 0,
}.items())
def test_a_field_that_a_registered_class_does_not_read_is_refused_by_name(name, value, registered_spec_of):
    """The class of a user reads each field of the file, or names it. No list says which fields may matter."""
    with pytest.raises(ModelLoadError, match=f"{name} is .*; expected no value, .*; .*`understands` or, .*`ignores`"):
        registered_spec_of(**{name: value})
    for member in ("understands", "ignores"):
        assert registered_spec_of(members={member: (name,)}, **{name: value}).num_layers == 4
    assert registered_spec_of(**{name: None}).num_layers == 4    # null is the same as no field
    with pytest.raises(ModelLoadError, match=f"does not read this field, nor {name}; "):
        registered_spec_of(clip_qkv=8, **{name: value})


def test_a_field_that_a_registered_class_asks_for_need_not_be_named(registered_spec_of):
    def read_spec(config, architecture):
        assert config.number("residual_scale") == 0.5 and config.replaced({"n": 2}).count("n") == 2
        return Plain.read_spec(config, architecture)

    assert registered_spec_of(members={"read_spec": read_spec}, residual_scale=0.5, n=3).num_layers == 4


def test_a_field_inside_an_object_is_read_or_refused_by_name(registered_spec_of):
    """At any depth; an object whose name the class lists is the class's own business."""
    def read_spec(config, architecture):
        inner = config.fields("scaling")
        assert inner.number("scale") == config.fields("scaling").fields("deep").number("power") == 2
        return Plain.read_spec(config, architecture)

    members = {"read_spec": read_spec}
    read = {"scale": 2, "deep": {"power": 2, "window": None}}
    assert registered_spec_of(members=members, scaling=read).num_layers == 4
    for wrong in (read | {"window": 4}, read | {"deep": {"power": 2, "window": 4}}):
        with pytest.raises(ModelLoadError, match="scaling.*window is 4; expected no value"):
            registered_spec_of(members=members, scaling=wrong)
        assert registered_spec_of(members=members | {"ignores": ("scaling",)}, scaling=wrong).num_layers == 4


@pytest.mark.parametrize("fields", [
    {"partial_rotary_factor": 1.0, "num_experts": 0, "is_encoder_decoder": False, "auto_map": {}},
    {"initializer_range": 0.02, "use_cache": True, "transformers_version": "5.0.0", "bos_token_id": 1},
    {"id2label": {"0": "LABEL_0"}, "_name_or_path": "", "attention_dropout": 0.1, "pretraining_tp": 2},
])
def test_a_field_that_changes_nothing_in_any_model_passes(fields, registered_spec_of):
    assert windows_of(registered_spec_of(**fields)) == (None,) * 4


@pytest.mark.parametrize("name, attribute, value", [
    ("rms_norm_eps", "default_norm_epsilon", 1e-5), ("rope_theta", "default_theta", 5e5)])
def test_a_field_without_a_default_of_the_family_must_be_there(name, attribute, value, registered_spec_of):
    for fields, found in (({}, "missing"), ({name: None}, "null")):
        with pytest.raises(ModelLoadError, match=f"{name} is {found}; .*no default.*; .*family's default"):
            registered_spec_of(without=(name,), **fields)
    spec = registered_spec_of(without=(name,), members={"options": {attribute: value}})
    assert (spec.norm_epsilon if name == "rms_norm_eps" else spec.rotary.theta) == value
    assert registered_spec_of(without=("rope_theta",), rope_parameters={"rope_theta": 7.0}).rotary.theta == 7.0


@pytest.mark.parametrize("architecture", [name for name in BASE if not name.startswith("GPT2")])
def test_what_transformers_leaves_aside_in_a_shipped_family_passes(architecture, spec_of):
    spec = spec_of(architecture, activation_function="relu", layer_norm_eps=0.1, residual_scale=0.5, use_rope=False)
    theta = 1e6 if architecture == "Gemma3ForCausalLM" else 1e4
    activation = "gelu_new" if architecture.startswith("Gemma") else "silu"
    assert (spec.norm_epsilon, spec.rotary.theta, spec.activation) == (1e-6, theta, activation)


def test_a_registered_architecture_is_used(spec_of, tmp_path, monkeypatch):
    monkeypatch.setattr("batch_manager.models.registry._models", dict(_models))
    register_model("MyForCausalLM", find_model("LlamaForCausalLM"))
    assert spec_of("MyForCausalLM").architecture == "MyForCausalLM"
    assert load_model(tmp_path, device="cpu", load_format="dummy").spec.num_layers == 4


@pytest.mark.parametrize("parameters", [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 20, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "truncate": False,
     "original_max_position_embeddings": 32},
], ids=lambda parameters: "-".join(map(str, parameters.values())))
def test_frequencies_and_amplitude_equal_those_of_transformers(parameters, spec_of):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = spec_of("LlamaForCausalLM", rope_parameters={**parameters, "rope_theta": 5e4}).rotary
    config = LlamaConfig(**DECODER, rope_parameters={**parameters, "rope_theta": 5e4})
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    torch.testing.assert_close(inverse_frequencies(rotary, 16), expected, rtol=1e-6, atol=0)
    assert rotary.amplitude == amplitude
