"""An oracle for config.json: which files `batch_manager.models` must refuse, and what it must read from the others.

The rules follow the definitions of the model families, independently of the source of batch_manager. They raise
`Unsure` for a configuration that they do not cover.
"""

import json
from collections.abc import Callable
from typing import Any

ARCHITECTURES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
                 "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}               # if the field is missing
POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new",
               "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
FOREIGN = {"auto_map": [{}], "quantization_config": [], "final_logit_softcapping": [],
           "num_local_experts": [0, 1], "is_encoder_decoder": [False], "pruned_heads": [{}], "clip_qkv": [],
           "use_mrope": [False], "partial_rotary_factor": [1], "no_rope_layers": [[]], "attention_multiplier": [],
           "per_layer_config": [{}]}
# Rotary parameters that the rules cover -> the field that a refusal names, or None for valid parameters.
ROTARY: list[tuple[dict[str, Any], str | None]] = [
    ({"rope_type": "default"}, None), ({"type": "linear", "factor": 2.0}, None),
    ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-30, "mscale": 0, "mscale_all_dim": 0.5}, None),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, None),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
    ({"type": "linear"}, "factor"), ({"type": "linear", "factor": -2.0}, "factor"),
    ({"type": "linear", "factor": "2"}, "factor"), ({"rope_type": "longrope"}, "long_factor"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-305}, "beta_slow"),
    ({"rope_type": "yarn", "factor": 4.0, "mscale": -0.5}, "mscale"),
    ({"rope_type": "yarn", "factor": 1e200}, "factor"), ({"rope_type": "yarn", "truncate": 1}, "truncate"),
    ({"rope_type": 7}, "rope_type"), ({"rope_type": "default", "mrope_section": [1]}, "mrope_section"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
]
_REQUIRED = object()


class Unsure(Exception):
    """Raised if the rules do not decide whether a checkpoint is valid."""


class _Fields:
    """Typed reader that collects the names of all faulty fields."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.faults = config, []

    def take(self, name: str, good: Callable[[Any], bool], default: Any = _REQUIRED) -> Any:
        value = self.config.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if value is None or not good(value):
            self.faults.append(name)
            return None
        return value

    def size(self, name: str, limit: int, default: Any = _REQUIRED, minimum: int = 1) -> Any:
        return self.take(name, lambda value: type(value) is int and minimum <= value <= limit, default)

    def number(self, name: str, default: float) -> Any:
        value = self.take(name, lambda value: type(value) in (int, float) and 1e-30 <= value <= 1e30, default)
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> Any:
        return self.take(name, lambda value: type(value) is bool, default)

    def one_of(self, name: str, known: dict[str, Any], default: Any) -> Any:
        return known.get(self.take(name, lambda value: type(value) is str and value in known, default))

    def texts(self, name: str) -> list[str]:
        return self.take(name, lambda value: type(value) is list and all(type(item) is str for item in value), []) or []


def read_config(config: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the faulty fields and, if no field is faulty, the attributes that the ModelSpec must have."""
    fields = _Fields(config)
    names = config.get("architectures")
    if names is None:                                  # as in transformers, the model type then decides
        names = [name for name, family in ARCHITECTURES.items() if family == config.get("model_type")]
    if type(names) is not list or len(names) != 1 or type(names[0]) is not str or names[0] not in ARCHITECTURES:
        return ["architectures"], {}
    family = ARCHITECTURES[names[0]]
    fields.one_of("model_type", {family: family}, family)
    for name, neutral in FOREIGN.items():
        value = config.get(name)
        if value is not None and not any(value == good and type(value) in (type(good), int, float)
                                         for good in neutral):
            fields.faults.append(name)
    kinds = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "auto": None, None: None}
    kinds |= {"float": "float32", "half": "float16"}
    kinds |= {f"torch.{kind}": meaning for kind, meaning in kinds.items() if kind}
    dtype = fields.one_of("dtype" if config.get("dtype") is not None else "torch_dtype", kinds, None)
    read = _read_gpt2 if family == "gpt2" else _read_decoder
    numbers = {"architecture": names[0], "dtype": dtype, **read(fields, family)}
    return fields.faults or _misfits(numbers), numbers


def _read_gpt2(fields: _Fields, family: str) -> dict[str, Any]:
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.take(name, lambda value: type(value) is dict, {}) or {}
        kinds = [(field, rope[field]) for field in ("rope_type", "type") if rope.get(field) is not None]
        wrong = [field for field, kind in kinds if type(kind) is not str]
        fields.faults += wrong or [name for _, kind in kinds[:1] if kind != "default"]
    if fields.flag("scale_attn_weights", True) is False:
        fields.faults.append("scale_attn_weights")
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if fields.flag(name, False):
            fields.faults.append(name)
    def name_of(name: str, other: str) -> str:
        return name if fields.config.get(other) is None else other

    layers = fields.size(name_of("n_layer", "num_hidden_layers"), 4096)
    _refuse_windows(fields, layers or 0)
    heads = fields.size(name_of("n_head", "num_attention_heads"), 4096)
    hidden = fields.size(name_of("n_embd", "hidden_size"), 2**20)
    if heads and hidden and hidden % heads:
        fields.faults.append(name_of("n_embd", "hidden_size"))
    return {"num_layers": layers, "num_heads": heads, "num_kv_heads": heads, "hidden_size": hidden,
            "head_size": hidden // heads if heads and hidden else None, "windows": (None,) * (layers or 0),
            "intermediate_size": fields.size("n_inner", 2**22, 4 * (hidden or 0)),
            "vocab_size": fields.size("vocab_size", 2**24),
            "max_position_embeddings": fields.size(name_of("n_positions", "max_position_embeddings"), 2**24, 1024),
            "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
            "activation": fields.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            "rotary": None, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": False}


def _read_decoder(fields: _Fields, family: str) -> dict[str, Any]:
    layers, heads = fields.size("num_hidden_layers", 4096), fields.size("num_attention_heads", 4096)
    hidden = fields.size("hidden_size", 2**20)
    head_size = fields.size("head_dim", 2**20, 128 if family == "qwen3" else 0)
    if head_size == 0 and heads and hidden:
        head_size = hidden // heads
        if hidden % heads:
            fields.faults.append("hidden_size")
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    if family == "llama":
        _refuse_windows(fields, layers or 0)
    windows = (_mistral_windows if family == "mistral" else _qwen_windows if "qwen" in family
               else lambda fields, layers: (None,) * layers)(fields, layers or 0)
    kv_heads = KV_HEADS.get(family, heads) if "num_key_value_heads" not in fields.config else heads
    numbers = {
        "num_layers": layers, "num_heads": heads, "num_kv_heads": fields.size("num_key_value_heads", 4096, kv_heads),
        "hidden_size": hidden, "head_size": head_size, "windows": windows,
        "intermediate_size": fields.size("intermediate_size", 2**20), "vocab_size": fields.size("vocab_size", 2**24),
        "max_position_embeddings": fields.size("max_position_embeddings", 2**24, POSITIONS[family]),
        "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "activation": fields.one_of("hidden_act", ACTIVATIONS, "silu"),
        "qkv_bias": family == "qwen2" or attention_bias, "out_bias": attention_bias,
        "mlp_bias": family == "llama" and fields.flag("mlp_bias", False), "qk_norm": family == "qwen3"}
    numbers["theta"] = _read_rotary(fields)
    return numbers


def _refuse_windows(fields: _Fields, layers: int) -> None:
    window, positions = fields.config.get("sliding_window"), fields.config.get("max_position_embeddings")
    if window is not None and fields.flag("use_sliding_window", True) and not (
            type(window) is int and (positions if type(positions) is int else 2**24) <= window <= 2**40):
        fields.faults.append("sliding_window")
    _one_kind(fields, "full_attention", layers)


def _one_kind(fields: _Fields, kind: str, layers: int) -> None:
    if fields.config.get("layer_types") is not None and fields.texts("layer_types") != [kind] * layers:
        fields.faults.append("layer_types")


def _window(fields: _Fields) -> int | None:
    return fields.size("sliding_window", 2**40, None if "sliding_window" in fields.config else 4096)


def _mistral_windows(fields: _Fields, layers: int) -> tuple[int | None, ...]:
    window = _window(fields)
    _one_kind(fields, "full_attention" if window is None else "sliding_attention", layers)
    return (window,) * layers


def _qwen_windows(fields: _Fields, layers: int) -> tuple[int | None, ...]:
    slides = fields.flag("use_sliding_window", False)
    window = _window(fields) if slides else None
    first = fields.size("max_window_layers", 2**40, 28, minimum=0) or 0
    kinds = fields.texts("layer_types")
    if fields.config.get("layer_types") is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    if (len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}
            or "sliding_attention" in kinds and not slides):
        fields.faults.append("layer_types")
    if slides and window is None and "sliding_attention" in kinds:
        fields.faults.append("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_rotary(fields: _Fields) -> float | None:
    """Return rope_theta, or None if the rotary frequencies are scaled or a rotary field is faulty.

    The names of faulty fields are added to `fields.faults`.
    """
    theta = fields.number("rope_theta", 10000.0)
    if fields.config.get("rope_scaling") in (None, {}):
        given = fields.config.get("rope_parameters")
        name = "rope_parameters"
    else:
        given, name = fields.config["rope_scaling"], "rope_scaling"
    if given in (None, {}):
        return theta
    if type(given) is not dict:
        fields.faults.append(name)
        return None
    for known, fault in ROTARY:
        if json.dumps(known) == json.dumps(given) and "original_max_position_embeddings" not in fields.config:
            fields.faults += [fault] if fault else []
            return None
    raise Unsure("rotary parameters that are not in the table")


def _misfits(numbers: dict[str, Any]) -> list[str]:
    """Return the names of fields whose numbers are valid individually but contradict other numbers."""
    heads, kv_heads, size, hidden = (numbers[name] for name in ("num_heads", "num_kv_heads", "head_size",
                                                                 "hidden_size"))
    faults = ["num_key_value_heads"] if heads % kv_heads else []
    if "rotary" not in numbers:
        faults += ["head size"] if size % 2 else []
        faults += ["max_position_embeddings"] if numbers["max_position_embeddings"] * size > 2**27 else []
    a_layer = 2 * (heads + kv_heads) * size * hidden + 2 * numbers["intermediate_size"] * hidden
    if numbers["num_layers"] * a_layer + numbers["vocab_size"] * hidden > 2**44:
        faults.append("weights")
    return faults


def expected_tensors(numbers: dict[str, Any], prefixed: bool):
    """Yield (name, shape) of every tensor that a model with these numbers needs.

    numbers    attributes of the ModelSpec
    prefixed   for GPT-2: whether names begin with "transformer."
    """
    get = numbers.__getitem__
    hidden, inner, vocab = get("hidden_size"), get("intermediate_size"), get("vocab_size")
    if get("architecture") == "GPT2LMHeadModel":
        prefix = "transformer." if prefixed else ""
        yield f"{prefix}wte.weight", (vocab, hidden)
        yield f"{prefix}wpe.weight", (get("max_position_embeddings"), hidden)
        for layer in range(get("num_layers")):
            name = f"{prefix}h.{layer}"
            for norm in ("ln_1", "ln_2"):
                yield from ((f"{name}.{norm}.{kind}", (hidden,)) for kind in ("weight", "bias"))
            for part, shape in (("attn.c_attn", (hidden, 3 * hidden)), ("attn.c_proj", (hidden, hidden)),
                                ("mlp.c_fc", (hidden, inner)), ("mlp.c_proj", (inner, hidden))):
                yield f"{name}.{part}.weight", shape
                yield f"{name}.{part}.bias", shape[1:]
        yield from ((f"{prefix}ln_f.{kind}", (hidden,)) for kind in ("weight", "bias"))
    else:
        yield "model.embed_tokens.weight", (vocab, hidden)
        yield "model.norm.weight", (hidden,)
        queries, keys = get("num_heads") * get("head_size"), get("num_kv_heads") * get("head_size")
        for layer in range(get("num_layers")):
            name = f"model.layers.{layer}"
            yield f"{name}.input_layernorm.weight", (hidden,)
            yield f"{name}.post_attention_layernorm.weight", (hidden,)
            for part, shape, bias in (
                    ("self_attn.q_proj", (queries, hidden), "qkv_bias"),
                    ("self_attn.k_proj", (keys, hidden), "qkv_bias"), ("self_attn.v_proj", (keys, hidden), "qkv_bias"),
                    ("self_attn.o_proj", (hidden, queries), "out_bias"), ("mlp.gate_proj", (inner, hidden), "mlp_bias"),
                    ("mlp.up_proj", (inner, hidden), "mlp_bias"),
                    ("mlp.down_proj", (hidden, inner), "mlp_bias")):
                yield f"{name}.{part}.weight", shape
                if get(bias):
                    yield f"{name}.{part}.bias", shape[:1]
            if get("qk_norm"):
                yield from ((f"{name}.self_attn.{which}_norm.weight", (get("head_size"),)) for which in "qk")
    if not get("tie_word_embeddings"):
        yield "lm_head.weight", (vocab, hidden)
