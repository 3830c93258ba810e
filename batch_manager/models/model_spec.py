"""What a model is, in numbers: the parsed and checked config.json."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from ..attention.interface import LayerAttention
from ..errors import ConfigError, ModelLoadError
from ..layers.mlp import ACTIVATIONS
from ..layers.rotary import KINDS, RotaryParameters
from ..weights.json_file import Fields

MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_VOCAB, MAX_POSITIONS = 4096, 4096, 2**20, 2**24, 2**24
MAX_WEIGHTS = 2**44                                  # of all layers together
MAX_ROTARY_ENTRIES = 2**27                           # 512 MiB of cosines and sines: two numbers ask for them, no file

# Fields that change what a model computes, with the values that leave the numbers alone. A file that says anything
# else is refused by name, unless the class of its architecture says that it understands the field. What brings tensors
# of its own, as experts do, is refused anyhow: no class asks for those.
_NEUTRAL = {
    "quantization_config": (), "compression_config": (),
    "partial_rotary_factor": (1, 1.0), "rotary_pct": (1, 1.0), "rope_interleaved": (False,), "use_mrope": (False,),
    "no_rope_layers": ([],), "no_rope_layer_interval": (), "attn_logit_softcapping": (), "final_logit_softcapping": (),
    "logit_scale": (1, 1.0), "logits_scaling": (1, 1.0), "embedding_multiplier": (1, 1.0), "scale_emb": (1, 1.0),
    "residual_multiplier": (1, 1.0), "attention_multiplier": (), "query_pre_attn_scalar": (), "clip_qkv": (),
    "parallel_attn": (False,), "use_parallel_residual": (False,), "alibi": (False,), "num_experts": (0, 1),
    "num_local_experts": (0, 1), "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "prune_heads": ({},), "pruned_heads": ({},), "is_causal": (True,), "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
}

# More of them, for classes that were registered. Of a shipped family it is known what transformers leaves aside.
_NEUTRAL_IN_OTHERS = {
    # windows
    **dict.fromkeys(("use_sliding_window", "window_attention"), (False,)),
    **dict.fromkeys(("sliding_window_size", "interleaved_sliding_window", "window_size", "attention_window",
                     "attention_window_size", "local_attention", "local_window", "local_attention_window_len",
                     "attention_chunk_size", "attention_types"), ()),
    # which layer is what
    **dict.fromkeys(("attn_layer_indices", "layer_group_size", "num_attention_heads_per_layer", "attn_config",
                     "ffn_config"), ()),
    **dict.fromkeys(("num_loops", "layer_repeat"), (1,)),
    **dict.fromkeys(("reverse_layers", "tie_layers", "attention_k_eq_v"), (False,)),
    "num_kv_shared_layers": (0,), "mlp_only_layers": ([],), "text_config": ({},),
    # norms and residuals
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm", "norm_after", "sub_layernorm",
                     "use_post_norm", "use_sandwich_norm", "parallel_residual", "normalize_embedding",
                     "normalize_embeddings", "layernorm_embedding", "apply_residual_connection_post_layernorm",
                     "_remove_final_layer_norm", "rescale_prenorm_residual"), (False,)),
    **dict.fromkeys(("final_layernorm", "do_layer_norm_before", "layer_norm_elementwise_affine"), (True,)),
    **dict.fromkeys(("norm_type", "qk_l2_clip_threshold"), ()),
    # factors and bounds
    **dict.fromkeys(("residual_scale", "embedding_scale", "embed_scale", "emb_scale", "embedding_multiplier_scale",
                     "output_multiplier", "output_multiplier_scale", "attn_output_multiplier",
                     "attention_output_multiplier", "attention_in_multiplier", "attention_out_multiplier",
                     "attention_value_scale", "key_multiplier", "lm_head_multiplier", "mlp_multiplier", "logits_scale",
                     "logits_mup_width_multiplier", "mup_width_scale"), (1,)),
    **dict.fromkeys(("scale_embedding", "scale_embeddings", "mup_enabled", "attn_temperature_tuning", "logn_attn",
                     "use_logn_attn", "use_dynamic_ntk", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
                    (False,)),
    **dict.fromkeys(("attention_scale", "attn_scale", "attention_softmax_scale", "softmax_scale", "scaling",
                     "scale_depth", "dim_model_base", "attn_logit_softcap", "attn_soft_cap", "logit_softcap",
                     "logit_softcapping", "logits_soft_cap", "final_logit_softcap", "output_logit_soft_cap",
                     "max_attn_val", "swiglu_limit", "swiglu_alpha", "gegelu_limit", "mlp_gate_softcap",
                     "mlp_up_softcap", "activation_sparsity_pattern", "log_scaling_alpha"), ()),
    "mlp_multipliers": ([1, 1],), "scale_attn_weights": (True,),
    # positions
    **dict.fromkeys(("rotary_percentage", "rotary_percent", "rotary_fraction", "rotary_emb_fraction", "rope_percent",
                     "rope_ratio"), (1,)),
    **dict.fromkeys(("rotary_dim", "rotary_ndims", "rotary_emb_scale_base", "rope_local_base_freq", "local_rope_theta",
                     "layer_rope_theta", "compress_rope_theta", "mrope_section", "rope_layers", "position_embeddings"),
                    ()),
    **dict.fromkeys(("rope_interleave", "rotary_emb_interleaved", "use_alibi", "use_nope", "learned_positions",
                     "learned_pos_emb", "use_learned_position_embeddings", "sinusoidal_embeddings"), (False,)),
    **dict.fromkeys(("use_rope", "use_rotary", "rope", "rotary"), (True,)),
    "nope_layers": ([],), "position_embedding_type": ("rope", "rotary"),
    # who sees whom
    **dict.fromkeys(("is_encoder", "bidirectional", "bidirectional_attention", "prefix_lm", "multi_query",
                     "new_decoder_architecture"), (False,)),
    "causal": (True,), "attention_type": (),
}

# Lists with the entry that leaves the numbers alone, for classes that were registered.
_NEUTRAL_ENTRIES = {"layer_types": "full_attention", "mlp_layer_types": "dense", "block_types": "attention",
                    "layers_block_type": "attention", "attention_layers": "global"}

# Fields that change nothing where the file says that there is no window, for classes that were registered.
_OF_A_WINDOW = ("sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern",
                "global_attn_every_n_layers")

# Names that different families have for one number, for classes that were registered: a class reads one of each. A name
# that it does not read must not say anything else.
_NAMES_OF_ONE = (
    ("hidden_act", "hidden_activation", "activation", "activation_function", "ff_activation", "mlp_hidden_act",
     "mlp_act", "act_fn", "afn"),
    ("rms_norm_eps", "rms_norm_epsilon", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon",
     "layernorm_epsilon"),
    ("rope_theta", "rotary_emb_base", "rotary_base"),
    ("rope_scaling", "rope_parameters"),
)

# activation names of transformers -> ours; different spellings of one function
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new",
                "gelu_pytorch_tanh": "gelu_new",
                "gelu_fast": "gelu_new", "relu": "relu"}
_NO_DEFAULT = ("a number: the class of this architecture has no default for it",
               "put it into the file, or give read_decoder_spec the family's default")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model's numbers. A family that has more of them adds fields in a subclass.

    head_size                entries of one attention head; hidden_size / num_heads unless the configuration says else
    vocab_size               rows of the embedding
    max_position_embeddings  positions the model was made for; with longrope those before stretching
    attention                one LayerAttention for each layer: scale, window, softcap, slopes, sink logits
    norm_epsilon             of all norms
    tie_word_embeddings      the head is the embedding
    rotary                   None: the model has learned positions, or slopes in `attention`
    rotary_size              leading entries of each head that are rotated; None: all
    qkv_bias, out_bias       of the attention's projections
    mlp_bias                 of the feed-forward projections
    qk_norm                  queries and keys are normed per head
    gated_mlp                the feed-forward network has three matrices, not two
    dtype                    "float32", "float16" or "bfloat16" as config.json says; None: it does not
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    attention: tuple[LayerAttention, ...]
    norm_epsilon: float
    tie_word_embeddings: bool
    activation: str
    rotary: RotaryParameters | None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    rotary_size: int | None = None
    dtype: str | None = None

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices of the model. Norms and biases, which are few beside them, are not counted."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        rows = self.num_layers * (attention + (3 if self.gated_mlp else 2) * self.intermediate_size)
        rows += self.vocab_size if self.tie_word_embeddings else 2 * self.vocab_size
        has_slopes = any(layer.alibi_slopes is not None for layer in self.attention)
        rows += self.max_position_embeddings if self.rotary is None and not has_slopes else 0
        return rows * self.hidden_size

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections."""
        return (self.num_heads * self.head_size, *(self.num_kv_heads * self.head_size,) * 2)


Spec = TypeVar("Spec", bound=ModelSpec)


def refuse_unknown_numerics(config: Fields, understood: Collection[str], *, is_shipped: bool) -> None:
    """Raise for a field that changes what a model computes and that its class does not understand.

    understood   the fields that the class reads, as it says itself
    is_shipped   the class is the shipped one of its architecture
    """
    for name, neutral in (_NEUTRAL if is_shipped else _NEUTRAL | _NEUTRAL_IN_OTHERS).items():
        value = config.values.get(name)
        if name in config and name not in understood and not any(
                type(value) in (type(good), int, float) and value == good for good in neutral):
            raise _not_understood(config, name)
    if "auto_map" in config and not (is_shipped and _is_of_the_same_name(config)):
        raise config.fault("auto_map", "not there: code that a checkpoint brings is never run",
                           "save the model without its code, or use one of an architecture that is known")
    if is_shipped:
        return
    for name, entry in _NEUTRAL_ENTRIES.items():
        value = config.values.get(name)
        if name in config and name not in understood and not (
                isinstance(value, list) and all(item == entry for item in value)):
            raise _not_understood(config, name)
    if config.values.get("use_sliding_window") is False or config.values.get("sliding_window", 0) is None:
        return
    for name in _OF_A_WINDOW:
        if name in config and name not in understood:
            raise _not_understood(config, name)


def refuse_unread_names(config: Fields, understood: Collection[str]) -> None:
    """Raise for a name that stands for the same as others do, where the class reads none of equal value.

    config       after the class read it
    understood   as in `refuse_unknown_numerics`
    """
    for names in _NAMES_OF_ONE:
        seen = [config.values[name] for name in names if name in config and name in config.asked_for]
        for name in names:
            if name in config and name not in understood and config.values[name] not in seen:
                raise _not_understood(config, name)


def _is_of_the_same_name(config: Fields) -> bool:
    """Whether the code beside a checkpoint is a class of the name that `architectures` has, from before transformers
    had it: transformers takes its own then."""
    by_task = config.values["auto_map"]
    text = by_task.get("AutoModelForCausalLM") if isinstance(by_task, dict) else None
    return isinstance(text, str) and [text.rpartition(".")[2]] == config.values["architectures"]


def _not_understood(config: Fields, name: str) -> ModelLoadError:
    return config.fault(name, "not supported",
                        "register_model takes a class that reads the field and names it in `understands`")


def read_decoder_spec(config: Fields, architecture: str, *, windows: tuple[int | None, ...], qkv_bias: bool = False,
                      out_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False,
                      scale: float | None = None, softcap: float | None = None, activation: str = "hidden_act",
                      default_activation: str = "silu", norm_epsilon: str = "rms_norm_eps",
                      default_norm_epsilon: float | None = None, default_theta: float | None = None,
                      head_size: int | None = None, num_kv_heads: int | None = None,
                      tie_word_embeddings: bool = False, partial_rotary_factor: float | None = None,
                      rope: Fields | None = None, max_positions: int, spec_class: type[Spec] = ModelSpec,
                      **own: Any) -> Spec:
    """The spec of a decoder with rotary positions and a gated feed-forward network, as Llama's relatives have.

    windows                    of each layer, as in LayerAttention
    scale, softcap             of all layers, as there; scale None: head_size ** -0.5
    activation, norm_epsilon   the fields that hold them
    head_size, num_kv_heads, tie_word_embeddings, max_positions, default_activation
                               the family's defaults; num_kv_heads None: the number of attention heads
    default_norm_epsilon, default_theta
                               the family's defaults too, of the norms and of `rope_theta`; None: it has none, and a
                               file without the field is refused
    rope                       the rotary parameters; None: those of `rope_parameters` or `rope_scaling`
    partial_rotary_factor      the family's default; None: it rotates whole heads, and a file that says other is refused
    spec_class, own            a subclass of ModelSpec, and what its own fields get
    Raises ModelLoadError naming file and field.
    """
    num_heads = config.count("num_attention_heads", maximum=MAX_HEADS)
    # As in transformers: the family's default holds where the field is left out. A null means one for each head.
    if num_kv_heads is None or "num_key_value_heads" in config.values:
        num_kv_heads = config.count("num_key_value_heads", num_heads, maximum=MAX_HEADS)
    hidden_size = config.count("hidden_size", maximum=MAX_WIDTH)
    head_size = config.count("head_dim", head_size, maximum=MAX_WIDTH) or even_share(config, "hidden_size",
                                                                                      hidden_size, num_heads)
    max_positions = config.count("max_position_embeddings", max_positions, maximum=MAX_POSITIONS)
    rotary = read_rotary(config, max_positions, default_theta, is_partial=partial_rotary_factor is not None, rope=rope)
    rotary_size = None
    if partial_rotary_factor is not None:
        rotary_size = _rotary_size(config, head_size, partial_rotary_factor)
    if rotary.kind == "longrope":
        _check_short_factors(config, rotary, rotary_size or head_size)
        max_positions = min(max_positions, rotary.original_max_positions)
    return spec_class(
        architecture=architecture,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size", maximum=MAX_WIDTH),
        vocab_size=config.count("vocab_size", maximum=MAX_VOCAB),
        max_position_embeddings=max_positions,
        attention=tuple(LayerAttention(scale=head_size**-0.5 if scale is None else scale, window=window,
                                       softcap=softcap) for window in windows),
        norm_epsilon=_epsilon(config, norm_epsilon, default_norm_epsilon),
        tie_word_embeddings=config.flag("tie_word_embeddings", tie_word_embeddings),
        activation=read_activation(config, activation, default_activation),
        rotary=rotary,
        rotary_size=rotary_size,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=read_dtype(config),
        **own,
    )


def check_spec(config: Fields, spec: ModelSpec, class_name: str, *, is_shipped: bool) -> None:
    """Raise where the numbers of a spec do not fit each other.

    is_shipped   the class is the shipped one of its architecture: its numbers are those of the file, or defaults
    Raises       ModelLoadError where the file says so, ConfigError naming the class where it was the class
    """
    def fault(is_from_file: bool, of_file: str, of_spec: str, expectation: str, fix: str) -> ConfigError:
        if is_shipped or is_from_file:
            return ModelLoadError(f"{config.where}: {of_file}", expectation, fix)
        return ConfigError(f"{class_name}.read_spec returned a spec whose {of_spec}", expectation, "correct the class")

    values = config.values
    if spec.num_heads % spec.num_kv_heads:
        default = "" if "num_key_value_heads" in config else ", the default of this architecture"
        raise fault(values.get("num_key_value_heads") == spec.num_kv_heads,
                    f"num_key_value_heads is {spec.num_kv_heads}{default}", f"num_kv_heads is {spec.num_kv_heads}",
                    f"a divisor of num_attention_heads, {spec.num_heads}", "check that both are right")
    if spec.head_size % 2 and spec.rotary is not None:
        raise fault(spec.head_size in (values.get("head_dim"), spec.hidden_size / spec.num_heads),
                    f"the head size is {spec.head_size}", f"head_size is {spec.head_size}",
                    "an even number: rotary positions turn pairs", "check hidden_size and head_dim")
    if spec.rotary is not None and spec.max_position_embeddings * spec.head_size > MAX_ROTARY_ENTRIES:
        positions = f"max_position_embeddings is {spec.max_position_embeddings:,}"
        raise fault(values.get("max_position_embeddings") == spec.max_position_embeddings, positions, positions,
                    f"at most {MAX_ROTARY_ENTRIES // spec.head_size:,} with a head size of {spec.head_size}",
                    "lower max_position_embeddings")
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size * spec.hidden_size
    total = spec.num_layers * (attention + 2 * spec.intermediate_size * spec.hidden_size) + (
        spec.vocab_size * spec.hidden_size)
    if total > MAX_WEIGHTS:
        raise ModelLoadError(f"{config.where}: the sizes ask for {total:,} weights", f"at most {MAX_WEIGHTS:,}",
                             "check that config.json belongs to this checkpoint")


def even_share(config: Fields, name: str, whole: int, parts: int) -> int:
    """whole / parts, for a head size that the configuration does not give."""
    if whole % parts:
        raise config.fault(name, f"a multiple of the number of attention heads, {parts}")
    return whole // parts


def name_in_use(config: Fields, name: str, alias: str) -> str:
    """`alias` where the file has it, else `name`: both stand for one number. Raises where they differ."""
    if name in config and alias in config and config.values[name] != config.values[alias]:
        raise config.fault(alias, f"not there, or what {name} is")
    return alias if alias in config else name


def layer_count(config: Fields, name: str = "num_hidden_layers") -> int:
    return config.count(name, maximum=MAX_LAYERS)


def read_activation(config: Fields, name: str, default: str) -> str:
    given = config.text(name, default)
    if given not in _ACTIVATIONS:
        raise config.fault(name, f"one of {', '.join(_ACTIVATIONS)}")
    assert _ACTIVATIONS[given] in ACTIVATIONS
    return _ACTIVATIONS[given]


def read_dtype(config: Fields) -> str | None:
    """`dtype`, which older configurations call `torch_dtype`."""
    name = "dtype" if "dtype" in config else "torch_dtype"
    given = config.text(name, "auto").removeprefix("torch.")
    if given != "auto" and given not in DTYPES:
        raise config.fault(name, f"one of {', '.join(DTYPES)}")
    return None if given == "auto" else given


def read_layer_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows of a family whose layers slide or not, by `layer_types` or by `max_window_layers` (Qwen2, Qwen3).

    As in transformers: a `sliding_window` that is left out is 4096, one that is null is none.
    """
    slides = config.flag("use_sliding_window", False)
    window = read_window(config) if slides else None
    first = config.count("max_window_layers", 28, minimum=0)
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    kinds = read_layer_types(config, default)
    if "sliding_attention" in kinds and not slides:
        raise config.fault("layer_types", "no sliding_attention while use_sliding_window is false")
    return windows_of(config, kinds, window)


def read_alternating_windows(config: Fields, period: int) -> tuple[int | None, ...]:
    """Windows of a family whose layers slide but for every `period`-th one, unless `layer_types` says other."""
    kinds = read_layer_types(config, ["sliding_attention" if (index + 1) % period else "full_attention"
                                      for index in range(layer_count(config))])
    return windows_of(config, kinds, read_window(config))


def read_one_window(config: Fields, window: int | None) -> tuple[int | None, ...]:
    """`window` for each layer, of a family that leaves `layer_types` aside: a list that says something else is another
    model, and is refused."""
    num_layers, kind = layer_count(config), "full_attention" if window is None else "sliding_attention"
    if set(read_layer_types(config, [kind] * num_layers)) != {kind}:
        raise config.fault("layer_types", f"{kind} everywhere, as sliding_window says")
    return (window,) * num_layers


def windows_of(config: Fields, kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer, by its kind in `layer_types`. window: `sliding_window`, None where it is null"""
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fault("layer_types", "full_attention or sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise config.fault("sliding_window", "a number of tokens, as layer_types names sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_softcap(config: Fields, name: str, default: float | None) -> float | None:
    """A softcap of a family that has `default` where the field is left out, and none where it is null."""
    return config.number(name, None if name in config.values else default)


def read_window(config: Fields) -> int | None:
    """`sliding_window` of a family that has 4096 where the field is left out, and none where it is null."""
    return config.count("sliding_window", None if "sliding_window" in config.values else 4096)


def read_layer_types(config: Fields, default: list[str]) -> list[str]:
    """`layer_types`, as many as there are in `default`."""
    kinds = config.texts("layer_types", default)
    if len(kinds) != len(default):
        raise config.fault("layer_types", f"one entry for each of the {len(default)} layers")
    return kinds


def refuse_windows(config: Fields, num_layers: int) -> None:
    """Raise when a family without sliding windows is given some."""
    if "sliding_window" in config and config.flag("use_sliding_window", True):
        raise config.fault("sliding_window", "null: this architecture has no sliding window")
    if set(read_layer_types(config, ["full_attention"] * num_layers)) != {"full_attention"}:
        raise config.fault("layer_types", "full_attention everywhere: this architecture has no other layers")


def refuse_rotary(config: Fields) -> None:
    """Raise when a family that does not rotate is given parameters of a rotation."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.fields(name, Fields({}, config.where))
        if rope.text("rope_type", rope.text("type", "default")) != "default":
            raise config.fault(name, "null: this architecture does not rotate")


def read_rotary(config: Fields, max_positions: int, default_theta: float | None = None,
                is_partial: bool = False, rope: Fields | None = None) -> RotaryParameters:
    """The rotary embedding, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`.

    default_theta   where the file has no `rope_theta`; None: it must have one
    is_partial      the family rotates a part of each head; else a file that says so is refused
    rope            the parameters, where a family has several; None: those two
    """
    rope = _rope_fields(config) if rope is None else rope
    if not is_partial and "partial_rotary_factor" in rope and rope.number("partial_rotary_factor") != 1.0:
        raise rope.fault("partial_rotary_factor", "1: rotation of a part of a head is not supported")
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    if theta is None:
        raise config.missing("rope_theta", *_NO_DEFAULT)
    kind = rope.text("rope_type", rope.text("type", "default"))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "original_max_position_embeddings",
             "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"} | ({"short_factor", "long_factor"} if kind == "longrope" else set())
    strange = sorted(name for name in rope.values.keys() - known if name in rope)
    if kind not in KINDS:
        raise ModelLoadError(f"{rope.where}: the rotary embedding is of type {kind!r}", f"one of {', '.join(KINDS)}",
                             "use a model with one of these")
    if strange:
        raise rope.fault(strange[0], "not supported")
    if kind == "default":
        return RotaryParameters(theta=theta)
    if kind == "linear":
        return RotaryParameters(kind=kind, theta=theta, factor=rope.number("factor"))

    # As in transformers: a value beside the rope parameters comes before the one among them.
    original = config.count("original_max_position_embeddings",
                            rope.count("original_max_position_embeddings", max_positions, maximum=MAX_POSITIONS),
                            maximum=MAX_POSITIONS)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise rope.fault("high_freq_factor", f"more than low_freq_factor, {low:g}")
        return RotaryParameters(kind=kind, theta=theta, factor=rope.number("factor"), original_max_positions=original,
                                low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        factor = rope.number("factor", max_positions / original)
        rope.numbers("long_factor")               # its own check: it is for longer sequences than are run
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        return RotaryParameters(kind=kind, theta=theta, factor=factor, original_max_positions=original,
                                short_factors=tuple(rope.numbers("short_factor")),
                                amplitude=rope.number("attention_factor", amplitude))
    if theta <= 1.0:
        raise rope.fault("rope_theta", "more than 1 with yarn")
    factor = rope.number("factor", max_positions / original)
    return RotaryParameters(
        kind=kind, theta=theta, factor=factor, original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0), beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True), amplitude=_yarn_amplitude(rope, factor))


def rope_fields_by_kind(config: Fields) -> tuple[Fields, Fields]:
    """The rotary parameters of the full layers and of the sliding ones, of a family that has a table for each:
    `rope_parameters` by kind of layer, or, in older files, `rope_scaling` of the full layers alone."""
    nothing = Fields({}, config.where)
    by_kind = config.fields("rope_parameters", nothing)
    strange = sorted(name for name in by_kind.values.keys() - {"full_attention", "sliding_attention"})
    if strange:
        raise by_kind.fault(strange[0], "not there: the parameters are those of full_attention and sliding_attention")
    older = config.fields("rope_scaling", nothing)
    if older.values and by_kind.values:
        raise config.fault("rope_scaling", "null beside rope_parameters")
    if "type" in older and "rope_type" not in older:
        raise older.fault("type", "not there: this architecture calls it rope_type")
    full, sliding = by_kind.fields("full_attention", older), by_kind.fields("sliding_attention", nothing)
    for rope in (full, sliding):
        if not rope.flag("truncate", True):            # transformers does not look at it here
            raise rope.fault("truncate", "true, or not there")
    return full, sliding


def _rope_fields(config: Fields) -> Fields:
    """`rope_scaling`, as older configurations call it, or `rope_parameters`; empty where there is neither."""
    rope = config.fields("rope_scaling", Fields({}, config.where))
    return rope if rope.values else config.fields("rope_parameters", rope)


def _epsilon(config: Fields, name: str, default: float | None) -> float:
    epsilon = config.number(name, default)
    if epsilon is None:
        raise config.missing(name, *_NO_DEFAULT)
    return epsilon


def _rotary_size(config: Fields, head_size: int, default: float) -> int:
    """Leading entries of a head that are rotated."""
    factor = _rope_fields(config).number("partial_rotary_factor", config.number("partial_rotary_factor", default))
    size = int(head_size * factor)
    if not 0 < size <= head_size or size % 2:
        raise ModelLoadError(f"{config.where}: partial_rotary_factor is {factor:g} and the head size {head_size}",
                             "an even number of entries of a head, at least 2 and at most all",
                             "check head_dim and partial_rotary_factor")
    return size


def _check_short_factors(config: Fields, rotary: RotaryParameters, size: int) -> None:
    if len(rotary.short_factors) != size // 2:
        raise ModelLoadError(f"{_rope_fields(config).where}: short_factor has {len(rotary.short_factors)} numbers",
                             f"one for each of the {size // 2} frequencies", "check head_dim and short_factor")


def _yarn_amplitude(rope: Fields, factor: float) -> float:
    given = rope.number("attention_factor", None)
    if given is not None:
        return given
    mscale, mscale_all = rope.number("mscale", 0.0, minimum=0.0), rope.number("mscale_all_dim", 0.0, minimum=0.0)
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
