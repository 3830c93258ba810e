"""Writes transformers models to GGUF files as llama.cpp's converter does, without the code of batch_manager.

The names of tensors come from the gguf library. This module reorders and changes the tensors as the converter does, and
quantizes them with the library. Tests compare with a copy of the model that has the quantized weights.
"""

import copy
import math
import re
from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma": "gemma",
                 "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi": "phi2", "Phi3": "phi3", "GPT2": "gpt2",
                 "Starcoder2": "starcoder2", "Olmo2": "olmo2", "Olmo3": "olmo2", "StableLm": "stablelm",
                 "Cohere": "command-r", "Cohere2": "cohere2", "GPTNeoX": "gptneox", "Granite": "granite",
                 "Mixtral": "llama", "Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "Olmoe": "olmoe",
                 "GraniteMoe": "granitemoe", "SmolLM3": "smollm3", "Falcon": "falcon", "Bloom": "bloom"}


# Types of random blocks: scale, minimum as a share of it, and the byte at which the scale is.
K_TYPES = {"Q4_K": (3.5e-4, 7.5, 0), "Q5_K": (1.8e-4, 15.5, 0), "Q6_K": (7e-5, 0.0, 208), "Q2_K": (0.012, 1.5, 80),
           "Q3_K": (2.4e-3, 0.0, 108), "IQ4_XS": (8e-5, 0.0, 0)}


def write_gguf(model: torch.nn.Module, path, family: str, kind: str | Callable[[str], str] = "F32",
               without: tuple[str, ...] = (),
               fused: bool = False, **changed) -> torch.nn.Module:
    """Write `model` to a GGUF file, and return a copy of the model with the numbers that the file holds.

    kind      GGUF type of the matrices, or a function of a tensor's name; norms and biases are F32. Matrices of K types
              are random, because the gguf library does not quantize to them
    fused     store queries, keys and values in one tensor
    without   keys of the metadata that are left out
    changed   metadata that differs from the converter's; "__" in a name stands for "."
    """
    architecture = ARCHITECTURES[family]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    metadata = metadata_of(model.config, architecture) | {key.replace("__", "."): value
                                                          for key, value in changed.items()}
    for key, value in metadata.items():
        if key not in without and value is not None:
            add(writer, key if "tokenizer" in key or "general" in key else f"{architecture}.{key}", value)
    held, state = copy.deepcopy(model), model.state_dict()
    parameters, fused_parts, stacked = dict(held.named_parameters()), {}, {}
    config, state, parameters = model.config, with_experts_apart(state), with_experts_apart(parameters)
    for name, tensor in state.items():
        if name in ("lm_head.weight", "embed_out.weight") and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        stem = stem.removeprefix("transformer.") if architecture == "bloom" else stem
        stored_name = f"{names.get_name(stem)}.{suffix}"
        if one := re.fullmatch(r"(.*)\.([qk])_layernorm\.norms\.(\d+)\.weight", name):     # one tensor of all heads
            of_heads = stacked.setdefault(stem.rpartition(".")[0], [])
            of_heads.append(tensor.numpy())
            if len(of_heads) == (config.num_attention_heads if one[2] == "q" else config.num_key_value_heads):
                block = re.search(r"layers\.(\d+)", name)[1]
                writer.add_tensor(f"blk.{block}.attn_{one[2]}_norm.weight", np.stack(of_heads))
            continue
        forwards = changes(architecture, name, model.config)
        stored = np.ascontiguousarray(forwards(tensor).float().numpy())
        kept = "F32"
        if "ffn_gate_inp_shexp" in stored_name and kind != "F32":              # some converters write one dimension
            stored = stored[0]
        if stored.ndim > 1 and "norm" not in stored_name and "ffn_gate_inp" not in stored_name:
            kept = kind if isinstance(kind, str) else kind(stored_name)
        if fused and (part := re.fullmatch(r"(.*\.attn)_([qkv])(\.\w+)", stored_name)):
            parts = fused_parts.setdefault(f"{part[1]}_qkv{part[3]}", {})
            parts[part[2]] = stored
            if len(parts) == 3:
                writer.add_tensor(f"{part[1]}_qkv{part[3]}", np.concatenate([parts[kind] for kind in "qkv"]))
            continue
        number = gguf.GGMLQuantizationType[kept]
        data = random_blocks(kept, stored.shape) if kept in K_TYPES else quantize(stored, number)
        writer.add_tensor(stored_name, data, raw_dtype=number)
        decoded = torch.from_numpy(dequantize(data, number)).reshape(stored.shape)
        came_from = forwards(torch.arange(tensor.numel()).view(tensor.shape)).reshape(-1)
        if forwards is plus_one:
            came_from, decoded = torch.arange(tensor.numel()), decoded - 1
        with torch.no_grad():
            flat = torch.empty(tensor.numel())
            flat[came_from] = decoded.reshape(-1)
            parameters[name].copy_(flat.view(tensor.shape))
    for name, factors in extra_tensors(model.config, architecture).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def with_experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, those of experts as the converter names them. Gate and up become two tensors."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe.experts", "mlp.experts").replace("router.weight", "router.layer.weight")
        if name.endswith("experts.gate_up_proj"):
            found |= zip((name.replace("gate_up_proj", f"{part}_proj.weight") for part in ("gate", "up")),
                         tensor.chunk(2, 1))
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


def random_blocks(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random blocks of a K type [..., bytes], whose numbers have a standard deviation of about 0.1."""
    draw, (scale, minimum, at) = np.random.default_rng(math.prod(shape)), K_TYPES[kind]
    rows, columns = math.prod(shape[:-1]), shape[-1]
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (rows, columns // size, num_bytes), np.uint8)
    for begin, number in ((at, scale), *([(at + 2, scale * minimum)] if minimum else [])):
        half = draw.uniform(number / 2, number, blocks.shape[:2]).astype(np.float16)
        blocks[..., begin : begin + 2] = half.view(np.uint8).reshape(*half.shape, 2)
    return blocks.reshape(*shape[:-1], -1)


def add(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def changes(architecture: str, name: str, config) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that the converter applies to the weight with this name, such as a transposition.

    architecture   the GGUF name of the architecture
    name           the weight's name in transformers
    """
    if architecture in ("llama", "granite", "granitemoe", "smollm3") and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return lambda tensor: tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return plus_one
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        return lambda tensor: tensor.t()
    if architecture == "falcon" and "query_key_value" in name:
        keys = config.num_kv_heads if config.new_decoder_architecture else 1
        size = config.hidden_size // config.num_attention_heads

        def by_kind_of_falcon(tensor):
            groups = tensor.reshape(keys, config.num_attention_heads // keys + 2, size, *tensor.shape[1:])
            return torch.cat([groups[:, :-2].reshape(-1, *tensor.shape[1:]), groups[:, -2].reshape(
                -1, *tensor.shape[1:]), groups[:, -1].reshape(-1, *tensor.shape[1:])])
        return by_kind_of_falcon
    if architecture in ("gptneox", "bloom") and "query_key_value" in name:
        def by_kind(tensor):
            parts = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
            return torch.cat([parts[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)])
        return by_kind
    return lambda tensor: tensor


def metadata_of(config, architecture: str) -> dict:
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = next((size for name in ("ffn_hidden_size", "intermediate_size", "n_inner")
                  if (size := getattr(config, name, None))), 4 * config.hidden_size)
    found = {
        "general.type": "model", "general.quantization_version": 2, "tokenizer.ggml.eos_token_id": 2,
        "block_count": config.num_hidden_layers,
        "context_length": getattr(config, "max_position_embeddings", 256),
        "embedding_length": config.hidden_size, "feed_forward_length": inner, "attention.head_count": heads,
        "attention.head_count_kv": None if architecture == "gptneox" else getattr(config, "num_key_value_heads", None),
        "rope.freq_base": full.get("rope_theta"),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": next((getattr(config, name) for name in (
            "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") if hasattr(config, name)), None),
    }
    if full.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full.get("rope_type") == "yarn":
        found |= {"rope.scaling.original_context_length": full["original_max_position_embeddings"],
                  "rope.scaling.yarn_beta_fast": full.get("beta_fast"),
                  "rope.scaling.yarn_beta_slow": full.get("beta_slow")}
    if architecture in ("llama", "granite", "granitemoe", "smollm3"):
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_size}
    if getattr(config, "head_dim", None) is not None and architecture not in ("granite", "phi3"):
        found |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if architecture in ("stablelm", "phi2", "phi3", "gptneox"):
        found["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head_size)
    if architecture in ("stablelm", "gptneox"):
        found["use_parallel_residual"] = True if architecture == "stablelm" else config.use_parallel_residual
    if architecture == "falcon":
        found |= {"tensor_data_layout": "jploski",
                  "attention.head_count_kv": config.num_kv_heads if config.new_decoder_architecture else 1}
    if architecture == "phi3":
        found |= {"rope.scaling.original_context_length": getattr(config, "original_max_position_embeddings", 4096),
                  "attention.sliding_window": config.sliding_window or 0}
        if full.get("rope_type") == "longrope":
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            found["rope.scaling.attn_factor"] = math.sqrt(
                1 + math.log(scale) / math.log(config.original_max_position_embeddings))
    if architecture in ("gemma2", "gemma3", "cohere2"):
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "olmo2" and hasattr(config, "sliding_window"):
        found |= {"attention.sliding_window": config.sliding_window,
                  "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}
    if architecture == "gemma3":
        found["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    found |= {"expert_count": getattr(config, "num_local_experts", getattr(config, "num_experts", None)),
              "expert_used_count": getattr(config, "num_experts_per_tok", None),
              "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None)}
    if architecture in ("qwen2moe", "qwen3moe"):
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[name] = getattr(config, name, None)
    if architecture in ("granite", "granitemoe"):
        found |= {"attention.scale": float(config.attention_multiplier), "logit_scale": float(config.logits_scaling),
                  "embedding_scale": float(config.embedding_multiplier),
                  "residual_scale": float(config.residual_multiplier)}
    if architecture in ("command-r", "cohere2"):
        found |= {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
    return found


def extra_tensors(config, architecture: str) -> dict[str, list[float]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    if rope.get("rope_type") != "llama3":
        return {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / size)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}
