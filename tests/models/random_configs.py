"""Generates random small configurations of the model families, and reads them with transformers' own classes."""

import copy
from random import Random
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

FAMILIES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
            "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "GemmaForCausalLM": "gemma",
            "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text", "Olmo2ForCausalLM": "olmo2",
            "Phi3ForCausalLM": "phi3", "GPTNeoXForCausalLM": "gpt_neox", "SmolLM3ForCausalLM": "smollm3",
            "StableLmForCausalLM": "stablelm", "Starcoder2ForCausalLM": "starcoder2",
            "PhiForCausalLM": "phi", "CohereForCausalLM": "cohere", "GPTJForCausalLM": "gptj",
            "GraniteForCausalLM": "granite", "Cohere2ForCausalLM": "cohere2",
            "Olmo3ForCausalLM": "olmo3", "OPTForCausalLM": "opt", "BloomForCausalLM": "bloom",
            "FalconForCausalLM": "falcon", "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe",
            "Qwen3MoeForCausalLM": "qwen3_moe", "OlmoeForCausalLM": "olmoe", "GraniteMoeForCausalLM": "granitemoe"}
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
WITH_TABLES = ("gemma3_text", "olmo3")                 # one for full and one for sliding layers
WITH_KINDS = ("gemma2", "gemma3_text")                 # of layers, whatever use_sliding_window says
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new",
               "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
LAYERS = (1, 2, 3, 4)
ROTARY = (
    {"rope_type": "default"}, {"type": "default"}, {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, {"type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5, 3, 3.5, 4.0, 5.0], "long_factor": [8.0] * 8,
     "original_max_position_embeddings": 32},
    {"type": "su", "short_factor": [1.25] * 8, "long_factor": [8.0] * 8},
    {"rope_type": "dynamic", "factor": 2.0}, {}, None)
# Fields of all families: a field that one family ignores may matter in another.
OPTIONAL: dict[str, tuple] = {
    "num_key_value_heads": (1, 2, 4, 8, 32, None), "head_dim": (4, 8, 16, None), "sliding_window": (3, 5, 8, None),
    "use_sliding_window": (True, True, False), "max_window_layers": (0, 1, 2, 5, 28), "layer_types": (None,),
    "attention_bias": (True, False), "mlp_bias": (True, False), "rms_norm_eps": (1e-5, 1e-6, 3e-4),
    "tie_word_embeddings": (True, False), "hidden_act": (*ACTIVATIONS, "tanh"), "rope_theta": (1e4, 5e5, 10000),
    "rope_scaling": ROTARY, "rope_parameters": ROTARY, "torch_dtype": ("float32", "bfloat16", None),
    "dtype": ("float16", None), "original_max_position_embeddings": (16,), "partial_rotary_factor": (1.0, 0.5),
    "max_position_embeddings": (64, 128), "n_positions": (64, 32), "n_head": (2, 4), "num_attention_heads": (2, 4, 8),
    "n_layer": LAYERS, "num_hidden_layers": LAYERS, "n_embd": (32, 64), "hidden_size": (32, 64, 36), "n_ctx": (16,),
    "n_inner": (48, None), "layer_norm_epsilon": (1e-5, 1e-3), "activation_function": (*ACTIVATIONS, "tanh"),
    "scale_attn_weights": (True, False), "scale_attn_by_inverse_layer_idx": (True, False),
    "reorder_and_upcast_attn": (True, False), "per_layer_config": (None, {}, {"0": {"num_key_value_heads": 1}}),
    "use_cache": (True, False), "attention_dropout": (0.0, 0.1), "initializer_range": (0.02,), "vocab_size": (97, 101),
    "intermediate_size": (48, 112), "num_local_experts": (0, 4), "pretraining_tp": (1, 2), "is_causal": (True,),
    "query_pre_attn_scalar": (8, 12), "attn_logit_softcapping": (2.0, 50.0, None), "rope_local_base_freq": (500.0, 1e4),
    "final_logit_softcapping": (3.0, 30.0, None), "hidden_activation": (*ACTIVATIONS, "tanh"),
    "sliding_window_pattern": (2, 3, 6), "use_bidirectional_attention": (False,),
    "rotary_pct": (0.5, 0.25), "rotary_emb_base": (500, 1e4), "use_parallel_residual": (True, False),
    "no_rope_layer_interval": (2, 3), "no_rope_layers": ([1, 0, 1, 1], [0, 0, 0, 1], None), "use_bias": (True, False),
    "norm_epsilon": (1e-3,), "use_qkv_bias": (True, False), "qk_layernorm": (True, False, False),
    "rotary_dim": (4, 16, 10), "logit_scale": (0.5, 2.0), "use_qk_norm": (False, True), "layer_norm_eps": (1e-3,),
    "embedding_multiplier": (3.0, 1.0), "residual_multiplier": (0.25, 1.0), "attention_multiplier": (0.5,),
    "logits_scaling": (4.0, 1.0), "bos_token_id": (1,), "eos_token_id": (2, [2, 3]), "architectures": (),
    "model_type": (), "ffn_dim": (48, 112), "do_layer_norm_before": (True, False), "enable_bias": (True, False),
    "_remove_final_layer_norm": (True, False), "word_embed_proj_dim": (32, 48, None),
    "layer_norm_elementwise_affine": (True, False), "apply_residual_connection_post_layernorm": (True, False),
    "n_embed": (32, 64), "seq_length": (64, 100), "slow_but_exact": (True, False), "alibi": (True, False),
    "num_kv_heads": (1, 2, 4, 3), "new_decoder_architecture": (True, False), "multi_query": (True, False),
    "parallel_attn": (True, False), "num_ln_in_parallel_attn": (1, 2), "bias": (True, False),
    "ffn_hidden_size": (48, None), "activation": (*ACTIVATIONS, "tanh"), "num_experts": (4, 6, 1),
    "num_experts_per_tok": (1, 3, 9), "norm_topk_prob": (True, False), "moe_intermediate_size": (24, 40),
    "shared_expert_intermediate_size": (16, 72), "decoder_sparse_step": (1, 2), "clip_qkv": (0.5, 8.0, None),
    "mlp_only_layers": ([0], [1, 2], [], None), "qkv_bias": (True, False),
}
# transformers has defaults for these; here a configuration must give them.
REQUIRED = {
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 112},
    "bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    "gptj": {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3",
                    "gpt_neox", "smollm3", "stablelm", "starcoder2", "phi", "cohere",
                    "granite", "cohere2", "olmo3", *WITH_EXPERTS), {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
        "num_attention_heads": 4})}
for _family in ("phi3", "smollm3"):                    # their default is outside a small vocabulary
    REQUIRED[_family] = {**REQUIRED[_family], "pad_token_id": 0}
REQUIRED["mixtral"] = {**REQUIRED["mixtral"], "head_dim": 16}    # transformers fails without it, for yarn and others


def random_config(random: Random) -> dict[str, Any]:
    architecture, model_type = random.choice(list(FAMILIES.items()))
    config = {"architectures": [architecture], **REQUIRED[model_type]}
    if random.random() < 0.7:
        config["model_type"] = model_type if random.random() < 0.95 else random.choice(list(FAMILIES.values()))
    if random.random() < 0.9:
        config["num_key_value_heads"] = 2
    for name in random.sample(list(OPTIONAL), random.choice((1, 2, 3, 4, 6))):
        if OPTIONAL[name]:
            config[name] = random.choice(OPTIONAL[name])
    if model_type not in ("gpt2", "gptj", "opt", "bloom", "falcon") and random.random() < 0.25:
        count = config["num_hidden_layers"] if random.random() < 0.9 else random.choice(LAYERS)
        kinds = random.choice((["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"]))
        config["layer_types"] = [random.choice(kinds) for _ in range(count)]
        if random.random() < 0.7:
            config["use_sliding_window"] = random.random() < 0.8
    return config


def numbers_of_transformers(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return {name: value} of the model that transformers builds from a config.json, such as num_layers and windows.

    Returns None if transformers refuses the configuration or fails.
    """
    model_type = config.get("model_type", FAMILIES[config["architectures"][0]])
    given = copy.deepcopy({name: value for name, value in config.items() if name != "model_type"})    # it changes them
    try:
        read = transformers.AutoConfig.for_model(model_type, **given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager")
    except Exception:
        return None
    return {"architecture": type(model).__name__,
            **{"gpt2": _of_gpt2, "gptj": _of_gptj, "opt": _of_opt, "bloom": _of_bloom, "falcon": _of_falcon}.get(
                model_type, _of_decoder)(read, model)}


def _of_gpt2(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    layers, first = model.transformer.h, model.transformer.h[0]
    return {
        "num_layers": len(layers), "num_heads": first.attn.num_heads, "num_kv_heads": first.attn.num_heads,
        "head_size": first.attn.head_dim, "hidden_size": model.transformer.wte.weight.shape[1],
        "intermediate_size": first.mlp.c_fc.weight.shape[1], "vocab_size": model.transformer.wte.weight.shape[0],
        "max_position_embeddings": model.transformer.wpe.weight.shape[0], "windows": (None,) * len(layers),
        "norm_epsilon": first.ln_1.eps, "tie_word_embeddings": read.tie_word_embeddings, "qkv_bias": True,
        "activation": ACTIVATIONS.get(read.activation_function), "out_bias": True, "mlp_bias": True, "qk_norm": False,
        "dtype": _dtype(read), "scales": _scales_of_gpt2(layers)}


def _of_gptj(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    layers, first = model.transformer.h, model.transformer.h[0]
    size = first.attn.head_dim
    # transformers 5.24 moved the table of positions from the layers to the model, and inverted and renamed the scale.
    table = getattr(model.transformer, "rotary_emb", first.attn).embed_positions
    scale = first.attn.scaling if hasattr(first.attn, "scaling") else 1 / first.attn.scale_attn
    exponents = torch.arange(0, first.attn.rotary_dim, 2, dtype=torch.int64) / first.attn.rotary_dim
    assert abs(scale * size**0.5 - 1) < 1e-6
    return {
        "num_layers": len(layers), "num_heads": first.attn.num_attention_heads,
        "num_kv_heads": first.attn.num_attention_heads, "head_size": size,
        "hidden_size": model.transformer.wte.weight.shape[1], "intermediate_size": first.mlp.fc_in.weight.shape[0],
        "vocab_size": model.transformer.wte.weight.shape[0], "max_position_embeddings": table.shape[0],
        "windows": (None,) * len(layers), "norm_epsilon": first.ln_1.eps,
        "tie_word_embeddings": read.tie_word_embeddings, "activation": ACTIVATIONS.get(read.activation_function),
        "qkv_bias": False, "out_bias": False, "mlp_bias": True, "qk_norm": False, "dtype": _dtype(read),
        "scales": (size**-0.5,) * len(layers), "rotary_size": first.attn.rotary_dim,
        "frequencies": tuple(round(float(1 / 10000**exponent), 7) for exponent in exponents)}


def _of_opt(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    base = model.model.decoder
    layers, first = base.layers, base.layers[0]
    attention = first.self_attn
    return {
        "num_layers": len(layers), "num_heads": attention.num_heads, "num_kv_heads": attention.num_heads,
        "head_size": attention.head_dim, "hidden_size": base.embed_positions.weight.shape[1],
        "intermediate_size": first.fc1.weight.shape[0], "vocab_size": base.embed_tokens.weight.shape[0],
        "max_position_embeddings": base.embed_positions.weight.shape[0] - base.embed_positions.offset,
        "windows": (None,) * len(layers), "norm_epsilon": first.final_layer_norm.eps,
        "tie_word_embeddings": read.tie_word_embeddings, "activation": ACTIVATIONS.get(read.activation_function),
        "qkv_bias": attention.q_proj.bias is not None, "out_bias": attention.out_proj.bias is not None,
        "mlp_bias": first.fc1.bias is not None, "qk_norm": False, "dtype": _dtype(read),
        "scales": (attention.scaling,) * len(layers), "embedding_size": base.embed_tokens.weight.shape[1],
        "norms_first": first.do_layer_norm_before, "has_last_norm": base.final_layer_norm is not None,
        "norms_have_weights": first.final_layer_norm.weight is not None}


def _of_bloom(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    base = model.transformer
    first, layers = base.h[0], base.h
    attention = first.self_attention
    return {
        "num_layers": len(layers), "num_heads": attention.num_heads, "num_kv_heads": attention.num_heads,
        "head_size": attention.head_dim, "hidden_size": base.word_embeddings.weight.shape[1],
        "intermediate_size": first.mlp.dense_h_to_4h.weight.shape[0], "windows": (None,) * len(layers),
        "vocab_size": base.word_embeddings.weight.shape[0], "norm_epsilon": first.input_layernorm.eps,
        "mlp_bias": first.mlp.dense_4h_to_h.bias is not None, "qk_norm": False,
        "tie_word_embeddings": read.tie_word_embeddings, "activation": "gelu_new",
        "qkv_bias": attention.query_key_value.bias is not None, "out_bias": attention.dense.bias is not None,
        "dtype": _dtype(read), "scales": (attention.head_dim**-0.5,) * len(layers),
        "slopes": tuple(_get_alibi_slopes(attention.num_heads, torch.device("cpu")).tolist()),
        "adds_to_normed": first.apply_residual_connection_post_layernorm}


def _of_falcon(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    base = model.transformer
    first, layers = base.h[0], base.h
    attention = first.self_attention
    numbers = {
        "num_layers": len(layers), "num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads,
        "head_size": attention.head_dim, "hidden_size": base.word_embeddings.weight.shape[1],
        "intermediate_size": first.mlp.dense_h_to_4h.weight.shape[0], "windows": (None,) * len(layers),
        "vocab_size": base.word_embeddings.weight.shape[0], "norm_epsilon": base.ln_f.eps,
        "mlp_bias": first.mlp.dense_4h_to_h.bias is not None, "qk_norm": False,
        "max_position_embeddings": _positions(read),
        "tie_word_embeddings": read.tie_word_embeddings, "activation": ACTIVATIONS.get(read.activation),
        "qkv_bias": attention.query_key_value.bias is not None, "out_bias": attention.dense.bias is not None,
        "dtype": _dtype(read), "scales": (attention.head_dim**-0.5,) * len(layers),
        "is_parallel": not hasattr(first, "post_attention_layernorm"), "has_own_norms": hasattr(first, "ln_mlp")}
    if base.use_alibi:
        slopes = _get_alibi_slopes(attention.num_heads, torch.device("cpu")).bfloat16()
        return {**numbers, "slopes": tuple(slopes.tolist())}
    frequencies, amplitude = _frequencies(read, attention.head_dim)
    return {**numbers, "frequencies": frequencies, "amplitude": amplitude}


def _scales_of_gpt2(layers: torch.nn.ModuleList) -> tuple[float, ...]:
    scales = []
    for index, layer in enumerate(layers):
        scale = layer.attn.head_dim**-0.5 if layer.attn.scale_attn_weights else 1.0
        scales.append(scale / (index + 1) if layer.attn.scale_attn_by_inverse_layer_idx else scale)
    return tuple(scales)


def _of_decoder(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    if read.model_type in ("phi3", "gpt_neox"):
        return _of_stacked(read, model)
    layers, attention, mlp = model.model.layers, model.model.layers[0].self_attn, _mlp(model.model.layers[0])
    size = rotated = attention.head_dim
    windows = tuple(getattr(layer.self_attn, "sliding_window", None) for layer in layers)
    if read.model_type in ("mistral", "starcoder2", "mixtral"):
        windows = (read.sliding_window,) * len(layers)
    elif read.model_type in ("qwen2", "qwen3", "cohere2", "olmo3", "qwen2_moe", *WITH_KINDS):
        windows = tuple(read.sliding_window if kind == "sliding_attention" else None for kind in read.layer_types)
        if not read.sliding_window and "sliding_attention" in read.layer_types:
            return {"windows": "the mask of these layers cannot be made"}
    own: dict[str, Any] = {}
    if read.model_type in WITH_EXPERTS:
        own |= {"experts": tuple(_experts(_mlp(layer)) for layer in layers), "norms_rows": read.model_type == "olmoe",
                "clip": getattr(read, "clip_qkv", None)}
    inside = getattr(mlp, {"starcoder2": "c_fc", "phi": "fc1"}.get(read.model_type, "up_proj"), None)
    out, norm = attention.o_proj if hasattr(attention, "o_proj") else attention.dense, model.model
    norm = norm.norm if hasattr(norm, "norm") else norm.final_layernorm
    if read.model_type == "phi":
        own["rotary_size"] = rotated = int(size * read.rope_parameters["partial_rotary_factor"])
    if read.model_type in ("granite", "granitemoe"):
        own |= {"embedding_scale": model.model.embedding_multiplier, "logits_divisor": read.logits_scaling,
                "residual_scale": layers[0].residual_multiplier}
    if read.model_type == "cohere2":
        own |= {"logit_scale": model.logit_scale,
                "slides": tuple(kind == "sliding_attention" for kind in read.layer_types)}
    if read.model_type == "cohere":
        own["logit_scale"] = model.logit_scale
    if read.model_type == "stablelm":
        own["rotary_size"] = rotated = int(size * read.rope_parameters["partial_rotary_factor"])
        own["is_parallel"] = layers[0].use_parallel_residual
    if read.model_type == "smollm3":
        own["rotates"] = tuple(bool(layer.self_attn.use_rope) for layer in layers)
    if read.model_type not in WITH_TABLES or "full_attention" in read.layer_types:
        own["frequencies"], own["amplitude"] = _frequencies(read, rotated)
    if read.model_type in WITH_TABLES and "sliding_attention" in read.layer_types:
        own["sliding_frequencies"] = _frequencies(read, size, "sliding_attention")[0]
    if read.model_type in WITH_KINDS:
        softcap = read.attn_logit_softcapping if read.model_type == "gemma2" else None
        own |= {"softcaps": (softcap,) * len(layers), "logits_softcap": read.final_logit_softcapping}
    return own | {
        "num_layers": len(layers), "num_heads": attention.q_proj.weight.shape[0] // size,
        "num_kv_heads": attention.k_proj.weight.shape[0] // size, "head_size": size,
        "hidden_size": model.model.embed_tokens.weight.shape[1], "vocab_size": model.model.embed_tokens.weight.shape[0],
        "intermediate_size": read.intermediate_size if inside is None else inside.weight.shape[0],
        "max_position_embeddings": _positions(read), "windows": windows,
        "norm_epsilon": getattr(norm, "variance_epsilon", None) or norm.eps,
        "tie_word_embeddings": read.tie_word_embeddings,
        "activation": ACTIVATIONS.get(read.hidden_activation if read.model_type in WITH_KINDS else read.hidden_act),
        "qkv_bias": attention.q_proj.bias is not None,
        "out_bias": out.bias is not None, "mlp_bias": getattr(inside, "bias", None) is not None,
        "qk_norm": hasattr(attention, "q_norm") or getattr(attention, "qk_layernorm", False),
        "dtype": _dtype(read), "scales": (attention.scaling,) * len(layers)}


def _mlp(layer: torch.nn.Module) -> torch.nn.Module:
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def _experts(mlp: torch.nn.Module) -> tuple[int, int, int, bool, int] | None:
    """Return a layer's (experts, experts of a token, their size, whether weights are renormalised, size of the shared
    expert or 0), or None if the layer has no experts."""
    if not hasattr(mlp, "experts"):
        return None
    router, (count, both, _) = mlp.gate if hasattr(mlp, "gate") else mlp.router, mlp.experts.gate_up_proj.shape
    shared = mlp.shared_expert.up_proj.weight.shape[0] if hasattr(mlp, "shared_expert") else 0
    return count, router.top_k, both // 2, getattr(router, "norm_topk_prob", True), shared


def _of_stacked(read: Any, model: torch.nn.Module) -> dict[str, Any]:
    """Return the {name: value} of a Phi-3 or GPT-NeoX, whose query, key and value weights are one tensor.

    read    the configuration, as transformers read it
    model   the model that transformers built from it
    """
    base = model.base_model
    is_phi, first = read.model_type == "phi3", base.layers[0]
    attention, layers = (first.self_attn if is_phi else first.attention), base.layers
    size = attention.head_dim if is_phi else attention.head_size
    part = int(size * read.rope_parameters["partial_rotary_factor"])
    frequencies, amplitude = _frequencies(read, part)
    inside = first.mlp.down_proj if is_phi else first.mlp.dense_4h_to_h
    qkv = attention.qkv_proj if is_phi else attention.query_key_value
    return {
        "num_layers": len(layers), "num_heads": read.num_attention_heads,
        "num_kv_heads": read.num_key_value_heads if is_phi else read.num_attention_heads, "head_size": size,
        "hidden_size": model.get_input_embeddings().weight.shape[1], "intermediate_size": inside.weight.shape[1],
        "vocab_size": model.get_input_embeddings().weight.shape[0], "max_position_embeddings": _positions(read),
        "windows": ((read.sliding_window if is_phi else None),) * len(layers),
        "norm_epsilon": base.norm.variance_epsilon if is_phi else base.final_layer_norm.eps,
        "tie_word_embeddings": read.tie_word_embeddings, "activation": ACTIVATIONS.get(read.hidden_act),
        "qkv_bias": qkv.bias is not None,
        "out_bias": (attention.o_proj if is_phi else attention.dense).bias is not None,
        "mlp_bias": inside.bias is not None, "qk_norm": False, "dtype": _dtype(read),
        "scales": (attention.scaling,) * len(layers), "frequencies": frequencies, "amplitude": amplitude,
        "rotary_size": part, **({} if is_phi else {"is_parallel": first.use_parallel_residual})}


def _positions(read: Any) -> int:
    """Return the number of positions that the engine supports.

    With longrope, the engine supports only original_max_position_embeddings.
    """
    if read.rope_parameters.get("rope_type") == "longrope":
        return min(read.max_position_embeddings, read.rope_parameters["original_max_position_embeddings"])
    return read.max_position_embeddings


def _frequencies(read: Any, size: int, kind_of_layer: str = "full_attention") -> tuple[tuple[float, ...], float]:
    """Return transformers' (rotary frequencies in radians per position, amplitude) for one kind of layer.

    size            number of rotated entries of a head
    kind_of_layer   "full_attention" or "sliding_attention"
    """
    rotary, which = read.rope_parameters, {}
    if kind_of_layer in rotary:
        rotary, which = rotary[kind_of_layer], {"layer_type": kind_of_layer}
    kind = rotary["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        frequencies, amplitude = 1.0 / rotary["rope_theta"]**exponents, 1.0
    else:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](read, device="cpu", **which)
    return tuple(round(float(number), 7) for number in frequencies), amplitude


def _dtype(read: Any) -> str | None:
    return None if read.dtype is None else str(read.dtype).removeprefix("torch.")
