"""Translates the metadata of a GGUF file into the fields of Hugging Face's config.json.

The family's model class reads and checks the values, as it does for a config.json. This module refuses a file
with an unread metadata key of the architecture, unless the key changes nothing. Values that GGUF files never
state, such as the activation, are the family's defaults in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelLoadError, UnsupportedModelError, counted
from .gguf_header import GgufArray, GgufHeader, GgufTensor, malformed, read_gguf_array
from .gguf_names import Heads
from .json_file import MAX_COUNT, MAX_NUMBER, MIN_NUMBER, Fields, shown, shown_entry

MOST_LAYERS = 4096

# Keys of any architecture that do not change the logits, with the values for which this is true; None: any value.
_NEUTRAL: dict[str, tuple | None] = {
    "rope.scaling.finetuned": None, "rope.scaling.original_context_length": None,
    "tensor_data_layout": ("Meta AI original pth",), "attention.causal": (True,),
    "expert_count": (0,), "expert_used_count": (0,), "expert_shared_feed_forward_length": (0,),
    "expert_gating_func": (1,), "leading_dense_block_count": (0,), "nextn_predict_layers": (0,),
    "attention.max_alibi_bias": (0,), "attention.clamp_kqv": (0,), "attention.sliding_window": (0,),
    "rope.scale_linear": (1,), "embedding_scale": (1,), "residual_scale": (1,), "logit_scale": (1,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,), "rope.scaling.attn_factor": (1,), "pooling_type": (0,),
    # one of these two belongs to the kind of norm that the architecture does not use
    "attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": None,
}


class GgufFields(Fields):
    """Configuration fields. An error about a field names the metadata key that its value comes from.

    keys   field -> metadata key, for the fields that have one
    """

    def __init__(self, values: dict[str, Any], where: str, keys: Mapping[str, str]) -> None:
        super().__init__(values, where)
        self._keys = keys

    def fault(self, name: str, expected: str, fix: str = "") -> ModelLoadError:
        if name not in self._keys:
            return super().fault(name, expected, fix)
        return ModelLoadError(f"{self.where}: {self._keys[name]} is {shown_entry(self.values, name)}",
                              f"expected {expected}", fix)

    def missing(self, name: str, expected: str,
                fix: str = "convert the model again, with a newer tool") -> ModelLoadError:
        return super().missing(name, expected, fix)


class Metadata:
    """Access to the metadata of a file, by name. A name is a metadata key without its "ARCHITECTURE." prefix."""

    def __init__(self, header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> None:
        self.header, self.tensors = header, tensors
        self.where = str(header.file)
        self.architecture = header.metadata.get("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"{self.where}: general.architecture is "
                f"{shown_entry(header.metadata, 'general.architecture')}",
                f"expected one of {', '.join(FAMILIES)}",
                "use a model of one of these architectures, or the model's Hugging Face checkpoint")
        self._read: set[str] = set()

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the key "ARCHITECTURE.name", or the default if the key is absent.

        As in llama.cpp, an array that has the same integer for every layer means this integer.
        """
        value = self.get_as_stored(name, default)
        if not isinstance(value, GgufArray) or "int" not in value.kind or value.count != self.get("block_count"):
            return value
        numbers = {int(number) for number in read_gguf_array(self.header, self.key(name))}
        return numbers.pop() if len(numbers) == 1 else value

    def get_as_stored(self, name: str, default: Any = None) -> Any:
        self._read.add(self.key(name))
        return self.header.metadata.get(self.key(name), default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelLoadError(f"{self.where}: {self.key(name)} is missing", "this architecture requires the key",
                                 "convert the model again, with a newer tool")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name) if default is not None else self.need(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self.fault(name, "a positive integer, the same for all layers")
        return value

    def fault(self, name: str, expected: str, fix: str = "") -> ModelLoadError:
        """Return the error to raise for an invalid value of a key.

        expected   the words after "expected" in the message
        """
        found = shown_entry(self.header.metadata, self.key(name))
        return ModelLoadError(f"{self.where}: {self.key(name)} is {found}", f"expected {expected}", fix)

    def has_tensor(self, name: str) -> bool:
        return name in self.tensors

    def refuse_unread_keys(self) -> None:
        """Raise ModelLoadError for an unread key of the architecture, unless its value leaves the results unchanged."""
        for key in self.header.metadata:
            name = key.removeprefix(f"{self.architecture}.")
            if name == key or key in self._read:
                continue
            neutral, value = _NEUTRAL.get(name, ()), self.get(name)
            if name == "attention.sliding_window" and type(value) is int and value >= self.count("context_length"):
                continue                               # the window has all positions
            if neutral is not None and not any(type(value) in (type(known), int, float) and value == known
                                               for known in neutral):
                raise self.fault(name, "only keys that the engine reads",
                                 "use a model without this key, or the model's Hugging Face checkpoint")


@dataclass(frozen=True, slots=True)
class Family:
    """How to turn one architecture's metadata into a configuration.

    name, model_type   `architectures` and `model_type` in Hugging Face's config.json
    special_fields     (metadata, heads, fields so far) -> fields of this family only; it can remove fields from the
                       third argument
    norm               name of the field of config.json with the epsilon of the norms
    is_layer_norm      whether the norms are LayerNorms; otherwise RMSNorms
    head_dim           whether the configuration has the field head_dim
    partial            name of the field of config.json with the rotated fraction of a head; "": whole heads are
                       rotated
    rotates            whether the model has rotary positions
    """

    name: str
    model_type: str
    special_fields: Callable[[Metadata, Heads, dict[str, Any]], dict[str, Any]] = lambda metadata, heads, values: {}
    norm: str = "rms_norm_eps"
    is_layer_norm: bool = False
    head_dim: bool = True
    partial: str = ""
    rotates: bool = True


def read_config(header: GgufHeader, tensors: Mapping[str, GgufTensor],
                factors: Callable[[str], list[float]]) -> tuple[GgufFields, Heads]:
    """Return the configuration of a GGUF file as fields of config.json, and its head counts and head size.

    tensors   name -> tensor, of all shards
    factors   (name of a tensor of rotary factors) -> its elements

    Raises ModelLoadError, which names file and key, or UnsupportedModelError, which names the architecture.
    """
    metadata = Metadata(header, tensors)
    _refuse_other_files(metadata)
    family = FAMILIES[metadata.architecture]
    layers, width = metadata.count("block_count"), metadata.count("embedding_length")
    if layers > MOST_LAYERS:
        raise metadata.fault("block_count", f"at most {MOST_LAYERS:,}")
    queries = metadata.count("attention.head_count")
    size = metadata.get("attention.key_length", width // queries)
    heads = Heads(queries, metadata.count("attention.head_count_kv", queries), size)
    if queries % heads.keys:
        raise metadata.fault("attention.head_count_kv", f"a divisor of attention.head_count, {queries}")
    epsilon = "attention.layer_norm_epsilon" if family.is_layer_norm else "attention.layer_norm_rms_epsilon"
    values = {
        "architectures": [family.name], "model_type": family.model_type, "num_hidden_layers": layers,
        "hidden_size": width, "num_attention_heads": queries, "num_key_value_heads": heads.keys,
        "intermediate_size": metadata.need("feed_forward_length"),
        "max_position_embeddings": metadata.need("context_length"),
        "vocab_size": _vocab_size(metadata), family.norm: metadata.need(epsilon),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"), "torch_dtype": _dtype(metadata),
        "pad_token_id": None,                  # the family's default in transformers can be outside the vocabulary
    }
    keys = {"num_hidden_layers": "block_count", "hidden_size": "embedding_length",
            "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
            "intermediate_size": "feed_forward_length", "max_position_embeddings": "context_length",
            "vocab_size": "vocab_size", family.norm: epsilon, "head_dim": "attention.key_length",
            "sliding_window": "attention.sliding_window", "rope_theta": "rope.freq_base",
            "logit_scale": "logit_scale", "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale", "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale", "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping", "use_parallel_residual": "use_parallel_residual",
            "num_experts": "expert_count", "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "norm_topk_prob": "expert_weights_norm"}
    values |= _head_size(metadata, family, width, heads)
    if family.rotates:
        values |= _rotary(metadata, family, heads, factors)
    values |= family.special_fields(metadata, heads, values)
    metadata.refuse_unread_keys()
    return GgufFields(values, metadata.where, {field: metadata.key(name) for field, name in keys.items()}), heads


def read_end_ids(header: GgufHeader) -> Fields | None:
    """Return the end ids, as the fields of a generation_config.json; None if the file has none."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [header.metadata[key] for key in keys if key in header.metadata]
    for key in keys:
        if type(header.metadata.get(key, 0)) is not int:
            raise malformed(header.file, f"{key} is {shown(header.metadata[key])}", "expected an integer")
    return Fields({"eos_token_id": ids}, str(header.file)) if ids else None


def _refuse_other_files(metadata: Metadata) -> None:
    kind = metadata.header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"{metadata.where}: general.type is {shown(kind)}", "expected 'model'",
                             "pass the file of the language model")
    version = metadata.header.metadata.get("general.quantization_version", 2)
    if version != 2:
        raise ModelLoadError(f"{metadata.where}: general.quantization_version is {shown(version)}", "expected 2",
                             "quantise the model again, with a newer tool")


def _vocab_size(metadata: Metadata) -> int:
    table = metadata.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelLoadError(
            f"{metadata.where}: token_embd.weight is {'missing' if table is None else 'not a matrix'}",
            "expected the token embeddings, a matrix", "check that the file is complete and contains a language model")
    if metadata.get("vocab_size", table.shape[0]) != table.shape[0]:
        raise metadata.fault("vocab_size", f"{table.shape[0]:,}, the number of rows of token_embd.weight")
    return table.shape[0]


def _dtype(metadata: Metadata) -> str:
    """Return the name of the dtype for the weights on a GPU, chosen by the types of the matrices in the file."""
    kinds = {tensor.kind for tensor in metadata.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    # Gemma's activations exceed the range of float16.
    return "bfloat16" if kinds <= {"F32", "BF16"} or metadata.architecture.startswith("gemma") else "float16"


def _head_size(metadata: Metadata, family: Family, width: int, heads: Heads) -> dict[str, Any]:
    given, share = metadata.get("attention.key_length"), width // heads.queries
    if given is not None and (type(given) is not int or not 1 <= given <= MAX_COUNT):
        raise metadata.fault("attention.key_length", "a positive integer")
    if metadata.get("attention.value_length", heads.size) != heads.size:
        raise metadata.fault("attention.value_length", f"{heads.size}, the head size of queries and keys")
    if given is None and width % heads.queries:
        raise metadata.fault("embedding_length", f"a multiple of the number of attention heads, {heads.queries}")
    if family.rotates and heads.size % 2:
        raise metadata.fault("attention.key_length" if given else "embedding_length",
                             ("" if given else "embedding_length / attention.head_count to be ")
                             + f"an even head size, not {heads.size}, because positions are rotary")
    if family.head_dim:
        return {"head_dim": heads.size}
    if heads.size * heads.queries != width:
        raise metadata.fault("attention.key_length", f"{share}, embedding_length / attention.head_count")
    return {}


def _rotary(metadata: Metadata, family: Family, heads: Heads, factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """Return the fields of the rotary positions, except those of sliding-window layers."""
    size = metadata.count("rope.dimension_count", heads.size)
    values: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", 10000.0)}
    if family.partial:
        if size > heads.size:
            raise metadata.fault("rope.dimension_count", f"at most the head size, {heads.size}")
        # Add half an entry, so that rounding in fraction * head size cannot lose one.
        values[family.partial] = 1.0 if size == heads.size else (size + 0.5) / heads.size
    elif size != heads.size:
        raise metadata.fault("rope.dimension_count", f"the head size, {heads.size}")
    scaling = _scaling(metadata)
    if metadata.architecture == "phi3":
        scaling = _longrope(metadata, scaling, values, factors)
    elif "rope_freqs.weight" in metadata.tensors:
        if scaling:
            raise metadata.fault("rope.scaling.type", "'none', because the file has the tensor rope_freqs.weight")
        scaling = _frequency_factors(metadata, heads, factors)
    return values | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """Return the field `rope_scaling`; empty if positions are not scaled."""
    kind = metadata.get("rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        if metadata.get("rope.scaling.factor", 1.0) not in (0, 1):
            raise metadata.fault("rope.scaling.factor", f"1 or no value, because rope.scaling.type is {kind}")
        return {"rope_type": "longrope"} if kind == "longrope" else {}
    if kind not in ("linear", "yarn"):
        raise metadata.fault("rope.scaling.type", "none, linear, yarn or longrope")
    scaling = {"rope_type": kind, "factor": metadata.need("rope.scaling.factor")}
    if kind == "linear" and scaling["factor"] == 1:
        return {}
    if kind == "linear":
        return scaling
    # Converters and llama.cpp disagree on the meaning of an attention factor with yarn. The key is not read here, so
    # refuse_unread_keys refuses a file with another factor than 1.
    scaling["original_max_position_embeddings"] = metadata.need("rope.scaling.original_context_length")
    for field, name in (("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")):
        if (value := metadata.get(name)) is not None:
            scaling[field] = value
    return scaling


def _longrope(metadata: Metadata, scaling: dict[str, Any], values: dict[str, Any],
              factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """Return the field `rope_scaling` of a Phi-3 model, or an empty dictionary if positions are not scaled.

    If positions are scaled, the factors of the field are read from two tensors. In this case, also sets
    `original_max_position_embeddings` in `values`.
    """
    longest = metadata.count("context_length")
    names = ["rope_factors_short.weight", "rope_factors_long.weight"]
    found = [name for name in names if metadata.has_tensor(name)]
    if scaling.get("rope_type", "longrope") != "longrope":
        raise metadata.fault("rope.scaling.type", "none or longrope")
    if not found and not scaling and metadata.count("rope.scaling.original_context_length", longest) >= longest:
        return {}
    if len(found) != 2:
        raise ModelLoadError(f"{metadata.where} contains {', '.join(found) or 'no rope factors'}",
                             f"expected the tensors {' and '.join(names)}", "check that the file is complete")
    values["original_max_position_embeddings"] = metadata.need("rope.scaling.original_context_length")
    return {"rope_type": "longrope", "attention_factor": metadata.get("rope.scaling.attn_factor", 1.0),
            "short_factor": factors(names[0]), "long_factor": factors(names[1])}


def _frequency_factors(metadata: Metadata, heads: Heads, factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """Return the field `rope_scaling` for a file with the tensor rope_freqs.weight, such as a file of Llama 3.1.

    The tensor has a divisor for each rotary frequency. The field has the type longrope. Its short factors and its
    long factors are these divisors. The field does not extend the context.
    """
    numbers = factors("rope_freqs.weight")
    if len(numbers) != heads.size // 2 or not all(MIN_NUMBER <= number <= MAX_NUMBER for number in numbers):
        raise ModelLoadError(f"{metadata.where}: rope_freqs.weight contains {counted(len(numbers), 'number')}: "
                             f"{shown(numbers)}",
                             f"expected a positive number for each of the {heads.size // 2} frequencies",
                             "convert the model again, with a newer tool")
    return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": numbers,
            "long_factor": numbers, "original_max_position_embeddings": metadata.need("context_length")}


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    """Return the field `layer_types`: for each layer, sliding-window or full attention.

    The metadata has a flag for each layer, or a number n: every n-th layer has full attention. If it has neither, n is
    `period`.
    """
    layers, name = metadata.count("block_count"), "attention.sliding_window_pattern"
    pattern = metadata.get_as_stored(name)
    if isinstance(pattern, GgufArray):
        if pattern.count != layers or pattern.kind == "text":
            raise metadata.fault(name, f"{counted(layers, 'flag')}, one for each layer")
        flags = np.asarray(read_gguf_array(metadata.header, metadata.key(name))).astype(bool).tolist()
    else:
        period = metadata.count(name, period)
        flags = [(index + 1) % period != 0 for index in range(layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in flags]


def _has_biases(metadata: Metadata, name: str) -> bool:
    return metadata.has_tensor(f"blk.0.{name}.bias")


def _refuse_grouped_keys(metadata: Metadata, heads: Heads) -> None:
    if heads.keys != heads.queries:
        raise metadata.fault("attention.head_count_kv", f"{heads.queries}, the number of attention heads, or no value")


def _llama(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has_biases(metadata, "attn_q"), "mlp_bias": _has_biases(metadata, "ffn_up")}


def _experts(metadata: Metadata, count: str) -> dict[str, Any]:
    """Return the fields of experts that all families have. `count` is the name of the field with their number."""
    return {count: metadata.need("expert_count"), "num_experts_per_tok": metadata.need("expert_used_count")}


def _llama_or_mixtral(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    if not metadata.get("expert_count", 0):
        return _llama(metadata, heads, values)
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_experts(metadata, "num_local_experts")}


def _with_experts(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of OLMoE, and of Qwen's families, whose experts have an intermediate size of their own."""
    is_qwen2, bias = metadata.architecture == "qwen2moe", _has_biases(metadata, "attn_q")
    fields = {**_experts(metadata, "num_experts"), "qkv_bias" if is_qwen2 else "attention_bias": bias,
              "norm_topk_prob": metadata.get("expert_weights_norm", metadata.architecture == "qwen3moe")}
    if metadata.architecture != "olmoe":
        fields["moe_intermediate_size"] = metadata.need("expert_feed_forward_length")
    if is_qwen2:
        fields["shared_expert_intermediate_size"] = metadata.need("expert_shared_feed_forward_length")
    return fields


def _with_attention_bias(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has_biases(metadata, "attn_q")}


def _granite(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    # In this architecture, unlike in others, the key switches rotary positions on and off.
    if metadata.get("rope.scaling.finetuned", True) is not True:
        raise metadata.fault("rope.scaling.finetuned",
                             "true, because a Granite without rotary positions is not supported")
    experts = {}
    if metadata.architecture == "granitemoe":
        experts = _experts(metadata, "num_local_experts")
    elif not metadata.get("expert_count", 0):
        metadata.get("expert_shared_feed_forward_length")    # dense Granite 4; without experts nothing reads it
    return {**experts, **_llama(metadata, heads, values), "logits_scaling": metadata.need("logit_scale"),
            "embedding_multiplier": metadata.get("embedding_scale", 1.0),
            "residual_multiplier": metadata.get("residual_scale", 1.0),
            "attention_multiplier": metadata.get("attention.scale", heads.size**-0.5)}


def _gemma2(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    given = {"sliding_window": metadata.get("attention.sliding_window"),
             "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
             "final_logit_softcapping": metadata.get("final_logit_softcapping")}
    return {**{name: value for name, value in given.items() if value is not None},
            "layer_types": _layer_types(metadata, 2), "query_pre_attn_scalar": _query_scalar(metadata, heads, 46)}


def _query_scalar(metadata: Metadata, heads: Heads, layers_of_27b: int) -> int:
    """Return the field `query_pre_attn_scalar` of Gemma 2 and 3, for which there is no metadata key.

    The 27B models, recognized by their number of layers, use hidden size / query heads. All others use the head size.
    """
    if metadata.count("block_count") != layers_of_27b:
        return heads.size
    return metadata.count("embedding_length") // heads.queries


def _gemma3(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    full = {"rope_type": "default", **values.pop("rope_scaling", {}), "rope_theta": values.pop("rope_theta")}
    sliding = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)}
    more = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding},
            "layer_types": _layer_types(metadata, 6), "query_pre_attn_scalar": _query_scalar(metadata, heads, 62),
            "final_logit_softcapping": metadata.get("final_logit_softcapping") or None}
    if "sliding_attention" in more["layer_types"]:
        more["sliding_window"] = metadata.need("attention.sliding_window")
    return more


def _olmo2(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in which OLMo 3 differs from OLMo 2. Returns no fields for OLMo 2.

    GGUF files of both models have the architecture name "olmo2". Only OLMo 3 has sliding windows.
    """
    window = metadata.get("attention.sliding_window")
    if not window:
        return {}
    full = {"rope_type": "default", **values.pop("rope_scaling", {}), "rope_theta": values.pop("rope_theta")}
    sliding = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", full["rope_theta"])}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window,
            "layer_types": _layer_types(metadata, 4),
            "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _cohere(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    return {**_with_attention_bias(metadata, heads, values), "logit_scale": metadata.need("logit_scale"),
            "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight")}


def _cohere2(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    return {**_with_attention_bias(metadata, heads, values), "logit_scale": metadata.need("logit_scale"),
            "sliding_window": metadata.need("attention.sliding_window"), "layer_types": _layer_types(metadata, 4)}


def _stablelm(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    # As in llama.cpp, the tensors decide. Converters always write true under the key; reading it marks it as known.
    metadata.get("use_parallel_residual")
    return {"use_qkv_bias": _has_biases(metadata, "attn_q"),
            "qk_layernorm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
            "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight")}


def _falcon(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Falcon as llama.cpp computes it: with parallel attention and MLP, and rotary positions."""
    if metadata.get("tensor_data_layout", "jploski") != "jploski":
        raise metadata.fault("tensor_data_layout", "'jploski' or no value")
    has_own_norms = metadata.has_tensor("blk.0.attn_norm_2.weight")
    is_new = has_own_norms or heads.keys > 1
    return {"ffn_hidden_size": values.pop("intermediate_size"), "num_kv_heads": values.pop("num_key_value_heads"),
            "bias": _has_biases(metadata, "attn_qkv"), "alibi": False, "parallel_attn": True,
            "new_decoder_architecture": is_new, "multi_query": not is_new,
            "num_ln_in_parallel_attn": 2 if has_own_norms else 1}


def _bloom(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    _refuse_grouped_keys(metadata, heads)
    if values.pop("intermediate_size") != 4 * values["hidden_size"]:
        raise metadata.fault("feed_forward_length", f"{4 * values['hidden_size']:,}, four times embedding_length")
    return {}


def _phi3(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window")
    if window is None:
        # Early files lack the key. As in llama.cpp, these four models are recognized by their sizes.
        layers, longest = values["num_hidden_layers"], values["max_position_embeddings"]
        windows = {(32, 4096): 2047, (40, 4096): 2047, (40, 131072): 131072}
        if heads.keys == 32:
            windows[32, 131072] = 262144
        window = windows.get((layers, longest)) or metadata.need("attention.sliding_window")
    return {"sliding_window": window or None}


def _gpt2(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    _refuse_grouped_keys(metadata, heads)
    return {"n_inner": values.pop("intermediate_size")}


def _gpt_neox(metadata: Metadata, heads: Heads, values: dict[str, Any]) -> dict[str, Any]:
    _refuse_grouped_keys(metadata, heads)
    return {"rotary_emb_base": values.pop("rope_theta"), "attention_bias": _has_biases(metadata, "attn_qkv"),
            "use_parallel_residual": metadata.need("use_parallel_residual")}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _llama_or_mixtral),
    "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", _with_experts),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _with_experts),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", _with_experts),
    "granitemoe": Family("GraniteMoeForCausalLM", "granitemoe", _granite),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _with_attention_bias),
    "gemma": Family("GemmaForCausalLM", "gemma"),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _olmo2),
    "granite": Family("GraniteForCausalLM", "granite", _granite),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _llama),
    "command-r": Family("CohereForCausalLM", "cohere", _cohere, norm="layer_norm_eps", is_layer_norm=True),
    "cohere2": Family("Cohere2ForCausalLM", "cohere2", _cohere2, norm="layer_norm_eps", is_layer_norm=True),
    "stablelm": Family("StableLmForCausalLM", "stablelm", _stablelm, norm="layer_norm_eps", is_layer_norm=True,
                       head_dim=False, partial="partial_rotary_factor"),
    "starcoder2": Family("Starcoder2ForCausalLM", "starcoder2",
                         lambda metadata, heads, values: {"use_bias": _has_biases(metadata, "attn_q")},
                         norm="norm_epsilon", is_layer_norm=True),
    "phi2": Family("PhiForCausalLM", "phi", norm="layer_norm_eps", is_layer_norm=True, head_dim=False,
                   partial="partial_rotary_factor"),
    "phi3": Family("Phi3ForCausalLM", "phi3", _phi3, partial="partial_rotary_factor"),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", _gpt2, norm="layer_norm_epsilon", is_layer_norm=True, head_dim=False,
                   rotates=False),
    "falcon": Family("FalconForCausalLM", "falcon", _falcon, norm="layer_norm_epsilon", is_layer_norm=True,
                     head_dim=False),
    "bloom": Family("BloomForCausalLM", "bloom", _bloom, norm="layer_norm_epsilon", is_layer_norm=True, head_dim=False,
                    rotates=False),
    "gptneox": Family("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox, norm="layer_norm_eps", is_layer_norm=True,
                      head_dim=False, partial="rotary_pct"),
}
