"""GGUF files of every architecture have the logits of transformers with the numbers that the files hold."""

import pytest

from .conftest import make_reference
from .gguf_writing import write_gguf
from .test_same_logits_as_transformers import LINEAR, LLAMA3, LONGROPE, NO_TOKENS, YARN

SIZES = {"intermediate_size": 96}
NEOX_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
CASES = {
    "llama": ("Llama", {}),
    "llama, one key head per query head, biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True,
                                                             "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, head size of its own": ("Llama", {"head_dim": 24}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, frequency factors": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": ("Gemma2", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma 3": ("Gemma3", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32, "num_hidden_layers": 7,
                           "rope_parameters": {"full_attention": LINEAR,
                                               "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "phi 2": ("Phi", {"intermediate_size": 256}),
    "phi 3": ("Phi3", {**NO_TOKENS, "sliding_window": 9}),
    "phi 3, a part of each head rotated": ("Phi3", {**NO_TOKENS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi 3, longrope": ("Phi3", {**NO_TOKENS, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "gpt2": ("GPT2", {}),
    "gpt2, untied": ("GPT2", {"tie_word_embeddings": False}),
    "starcoder 2": ("Starcoder2", {}),
    "olmo 2": ("Olmo2", {}),
    "olmo 3": ("Olmo3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
                         "num_hidden_layers": 4}),
    "stablelm": ("StableLm", {}),
    "stablelm, side by side, biases": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True,
                                                    "partial_rotary_factor": 0.5}),
    "command-r": ("Cohere", {**NO_TOKENS, "logit_scale": 0.3}),
    "cohere 2": ("Cohere2", {**NO_TOKENS, "logit_scale": 0.5, "sliding_window": 9, "num_hidden_layers": 5}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": NEOX_ROPE}),
    "gpt-neox, one after the other": ("GPTNeoX", {"use_parallel_residual": False, "rope_parameters": NEOX_ROPE}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4,
                            "logits_scaling": 0.5}),
    "smollm 3": ("SmolLM3", {**NO_TOKENS, "num_hidden_layers": 5}),
}


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, kind, tmp_path, prompts, check_against, driver):
    family, options = CASES[case]
    model = make_reference(family, **{**SIZES, **options} if family != "GPT2" else options)
    if kind == "Q8_0" and any(parameter.shape[-1] % 32 for parameter in model.parameters() if parameter.dim() > 1):
        pytest.skip("rows of this shape have no whole blocks")
    held = write_gguf(model, tmp_path / "model.gguf", family, kind)
    check_against(held, driver(tmp_path / "model.gguf"), prompts([1, 17, 40]), steps=6)
