"""Reads the spec of a model from the fields of its config.json, and checks the numbers."""

import math
from collections.abc import Collection
from typing import Any

from ..attention.interface import LayerAttention
from ..contained_log import log
from ..errors import ConfigError, ModelLoadError, counted, printable
from ..layers.mlp import ACTIVATIONS
from ..layers.rotary import KINDS, RotaryParameters
from ..weights.json_file import Fields, shown
from .alibi_slopes import alibi_slopes
from .spec import DTYPES, ModelSpec, Spec

MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_VOCAB, MAX_POSITIONS = 4096, 4096, 2**20, 2**24, 2**24
MAX_WEIGHTS = 2**44                                  # elements of all layers together
MAX_ROTARY_ENTRIES = 2**27                           # 512 MiB of cosines and sines, which config.json alone can request

# Field that changes what a model computes -> values that change nothing. Any other value is refused by name, unless the
# model class reads the field. Fields that imply additional tensors, such as those of experts, need no entry, because
# tensors that the model class does not request are refused.
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

_CHECKED_WHERE_READ = ("rope_parameters", "rope_scaling")      # objects in which the reader itself refuses other fields

# Fields that change nothing about what a model computes for given token ids. transformers or a trainer writes them into
# the file of any family.
_HARMLESS = frozenset((
    # the file
    "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "tokenizer_class", "torch_dtype",
    "transformers_version",
    # training
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
    "dropout", "embd_pdrop", "embedding_dropout", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
    "init_std", "initializer_factor", "initializer_range", "layerdrop", "pretraining_tp", "resid_pdrop",
    "residual_dropout", "router_aux_loss_coef", "router_jitter_noise",
    # the tokenizer and generation, which have files of their own
    "bos_token_id", "cache_implementation", "eos_token_id", "max_length", "model_max_length", "pad_token_id", "prefix",
    "task_specific_params", "unk_token_id", "use_cache",
    # what transformers returns
    "chunk_size_feed_forward", "id2label", "is_decoder", "label2id", "output_attentions", "output_hidden_states",
    "output_router_logits", "problem_type", "return_dict", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
))

# Activation name in transformers -> name here. Several names mean the same function.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new",
                "gelu_pytorch_tanh": "gelu_new",
                "gelu_fast": "gelu_new", "relu": "relu"}
_NO_DEFAULT = ("a number, because the model class has no default for it",
               "set it in the file, or pass the family's default to read_decoder_spec")
_DTYPE_NAMES = {**{name: name for name in DTYPES}, "float": "float32", "half": "float16"}    # as attributes of torch

# Field of rotary parameters that no kind reads -> values that change nothing; None: any value. transformers ignores
# these fields too; other engines read some of them.
_NEUTRAL_IN_ROPE: dict[str, tuple | None] = {
    "finetuned": None, "attn_factor": (1,), "extrapolation_factor": (1,), "apply_yarn_scaling": (True,),
    "mrope_interleaved": (False,)}
# Field of rotary parameters -> kinds that read it. For other kinds, the log says that it has no effect.
_READ_BY_SOME_KINDS = {"factor": ("linear", "dynamic", "llama3", "yarn", "longrope"),
                       "attention_factor": ("yarn", "longrope")}


def refuse_code(config: Fields, *, is_shipped: bool) -> None:
    """Raise ModelLoadError if `auto_map` of a checkpoint names code that could compute something else.

    is_shipped   whether the model class is this package's class for the architecture
    """
    if "auto_map" in config and config.values["auto_map"] != {} and not (is_shipped and _names_shipped_class(config)):
        raise config.fault("auto_map", "no value, because code of a checkpoint is never run",
                           "save the model without its code, or use a known architecture")


def refuse_unread_fields(config: Fields, named: Collection[str], *, is_shipped: bool) -> None:
    """Raise ModelLoadError if the model class has not read a field that can change what the model computes.

    config       the fields of the file, after the model class has read its spec
    named        `understands` and `ignores` of the model class
    is_shipped   whether the model class is this package's class for the architecture: only the fields in _NEUTRAL are
                 checked, because it is known which fields transformers ignores. Of any other class, all fields are
                 checked that are not in _HARMLESS
    """
    checked = _NEUTRAL if is_shipped else [name for name in config.values if name not in _HARMLESS]
    unread = [name for name in checked if name in config and name not in config.asked_for and name not in named
              and not _changes_nothing(config.values[name], _NEUTRAL.get(name, ()))]
    if not is_shipped:
        for name, fields in config.nested.items():
            if name not in named and name not in _CHECKED_WHERE_READ:
                refuse_unread_fields(fields, (), is_shipped=False)
    if "quantization_config" in unread:
        raise config.fault("quantization_config", "unquantised weights, because quantised ones are not supported",
                           "use a checkpoint with weights in F32, F16 or BF16, or a GGUF file")
    if unread:
        others = f", nor {printable(', '.join(unread[1:8]))[:400]}" if unread[1:] else ""
        raise config.fault(unread[0], f"no value, because the model class does not read this field{others}",
                           "register a model class that reads the field with a method of its config, or lists it in "
                           "`understands` or, if it changes nothing, in `ignores`")


def _changes_nothing(value: object, neutral: tuple | None) -> bool:
    """Whether a field's value is one of the neutral ones; None: any value is neutral."""
    return neutral is None or any(type(value) in (type(known), int, float) and value == known for known in neutral)


def _names_shipped_class(config: Fields) -> bool:
    """Whether `auto_map` names the same class as `architectures`.

    The checkpoint's code is then the older form of a class that transformers has, and transformers uses its own class.
    """
    by_task = config.values["auto_map"]
    text = by_task.get("AutoModelForCausalLM") if isinstance(by_task, dict) else None
    return isinstance(text, str) and [text.rpartition(".")[2]] == config.values["architectures"]


def read_decoder_spec(config: Fields, architecture: str, *, windows: tuple[int | None, ...] | None = None,
                      qkv_bias: bool = False, out_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False,
                      scale: float | None = None, softcap: float | None = None, activation: str = "hidden_act",
                      default_activation: str = "silu", norm_epsilon: str = "rms_norm_eps",
                      default_norm_epsilon: float | None = None, default_theta: float | None = None,
                      head_size: int | None = None, num_kv_heads: int | None = None,
                      tie_word_embeddings: bool = False, partial_rotary_factor: float | None = None,
                      rope: Fields | None = None, max_positions: int, spec_class: type[Spec] = ModelSpec,
                      **more_fields: Any) -> Spec:
    """Read the spec of a decoder with rotary positions, such as Llama and its relatives.

    windows                    window of each layer in tokens, as in LayerAttention; None: no window in the layer. None
                               for all: a file with windows is refused
    scale, softcap             values for all layers, as in LayerAttention; scale None: head_size ** -0.5; softcap None:
                               no cap
    activation, norm_epsilon   names of the fields in the file that state the activation and the norms' epsilon
    head_size, num_kv_heads, tie_word_embeddings, max_positions, default_activation
                               the family's defaults; head_size None: hidden_size / attention heads; num_kv_heads None:
                               the number of attention heads
    default_norm_epsilon, default_theta
                               the family's defaults of the norms' epsilon and of `rope_theta`; None: a file without
                               the field is refused
    rope                       the rotary parameters; None: those in `rope_parameters` or `rope_scaling`
    partial_rotary_factor      the family's default for the rotated fraction of each head; None: whole heads are
                               rotated, and a file with another factor than 1 is refused
    spec_class, more_fields    the class of the spec, and the values of the fields that it adds to ModelSpec
    Raises ModelLoadError, which names file and field.
    """
    if windows is None:
        windows = without_windows(config)
    num_heads = config.count("num_attention_heads", maximum=MAX_HEADS)
    # As in transformers: the family's default applies if the field is absent; null means one key head per query head.
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
        **more_fields,
    )


def read_multi_head_spec(config: Fields, architecture: str, *, hidden_size: int, width: str = "hidden_size",
                         layers: str = "num_hidden_layers", heads: str = "num_attention_heads",
                         positions: str = "max_position_embeddings", max_positions: int,
                         tie_word_embeddings: bool = True, alibi: bool = False,
                         rotary: RotaryParameters | None = None, spec_class: type[Spec] = ModelSpec,
                         **more_fields: Any) -> Spec:
    """Read the spec of an older decoder: a key head for each query head, an ungated network, no scaled positions.

    width, layers, heads, positions      names of the fields with the hidden size and with these numbers
    max_positions, tie_word_embeddings   the family's defaults
    alibi                                whether the positions are ALiBi slopes
    spec_class, more_fields              the class of the spec, and the values of its other fields
    Raises ModelLoadError, which names file and field.
    """
    windows = without_windows(config, layers)
    refuse_rope_scaling(config)
    num_heads = config.count(heads, maximum=MAX_HEADS)
    head_size = even_share(config, width, hidden_size, num_heads)
    attention = LayerAttention(scale=head_size**-0.5, alibi_slopes=alibi_slopes(num_heads) if alibi else None)
    return spec_class(
        architecture=architecture,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        hidden_size=hidden_size,
        vocab_size=config.count("vocab_size", maximum=MAX_VOCAB),
        max_position_embeddings=config.count(positions, max_positions, maximum=MAX_POSITIONS),
        attention=(attention,) * len(windows),
        tie_word_embeddings=config.flag("tie_word_embeddings", tie_word_embeddings),
        rotary=rotary,
        gated_mlp=False,
        dtype=read_dtype(config),
        **more_fields,
    )


def check_spec(config: Fields, spec: ModelSpec, class_name: str, *, is_shipped: bool) -> None:
    """Raise ModelLoadError or ConfigError if the numbers of a spec do not fit together.

    is_shipped   whether the model class is this package's class for the architecture. All numbers of such a class come
                 from the file or from the family's defaults
    Raises       ModelLoadError in three cases: `is_shipped` is true, the wrong number is from the file, or the
                 model has too many weights. In all other cases: ConfigError, which names the class
    """
    def fault(is_from_file: bool, of_file: str, of_spec: str, expected: str, fix: str) -> ConfigError:
        if is_shipped or is_from_file:
            return ModelLoadError(f"{config.where}: {of_file}", f"expected {expected}", fix)
        return ConfigError(f"{class_name}.read_spec returned a spec whose {of_spec}", f"expected {expected}", "")

    values = config.values
    if spec.num_heads % spec.num_kv_heads:
        default = "" if "num_key_value_heads" in config else ", the default of this architecture"
        raise fault(values.get("num_key_value_heads") == spec.num_kv_heads,
                    f"num_key_value_heads is {spec.num_kv_heads}{default}", f"num_kv_heads is {spec.num_kv_heads}",
                    f"a divisor of num_attention_heads, {spec.num_heads}", "check both fields")
    if spec.head_size % 2 and spec.rotary is not None:
        raise fault(spec.head_size in (values.get("head_dim"), spec.hidden_size / spec.num_heads),
                    f"the head size is {spec.head_size}", f"head_size is {spec.head_size}",
                    "an even number, because rotary positions rotate pairs of entries",
                    "check hidden_size and head_dim")
    if spec.rotary is not None and spec.max_position_embeddings * spec.head_size > MAX_ROTARY_ENTRIES:
        positions = f"max_position_embeddings is {spec.max_position_embeddings:,}"
        raise fault(values.get("max_position_embeddings") == spec.max_position_embeddings, positions, positions,
                    f"at most {MAX_ROTARY_ENTRIES // spec.head_size:,} with a head size of {spec.head_size}",
                    "lower max_position_embeddings")
    if spec.max_position_embeddings < 2:
        name = "n_positions" if "n_positions" in config else "max_position_embeddings"
        positions = f"{spec.max_position_embeddings}"
        raise fault(values.get(name) == spec.max_position_embeddings, f"{name} is {positions}",
                    f"max_position_embeddings is {positions}", "at least 2, for a prompt and an output of one token",
                    "correct the field")
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size * spec.hidden_size
    total = spec.num_layers * (attention + 2 * spec.intermediate_size * spec.hidden_size) + spec.hidden_size * (
        spec.vocab_size + sum(layer.rows for layer in spec.experts if layer is not None))
    if total > MAX_WEIGHTS:
        raise ModelLoadError(f"{config.where}: the sizes imply {total:,} weights", f"expected at most {MAX_WEIGHTS:,}",
                             "check that config.json belongs to this checkpoint")


def even_share(config: Fields, name: str, whole: int, parts: int) -> int:
    """Return whole / parts. Raises ModelLoadError if there is a remainder.

    name    field that states `whole`, for the message of the error
    parts   number of attention heads
    """
    if whole % parts:
        raise config.fault(name, f"a multiple of the number of attention heads, {parts}")
    return whole // parts


def name_or_alias(config: Fields, name: str, alias: str) -> str:
    """Return `alias` if the file has this field, else `name`. Raises ModelLoadError if both fields exist and differ."""
    if name in config and alias in config and config.values[name] != config.values[alias]:
        raise config.fault(alias, f"no value, or the value of {name}")
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
    """Return the field `dtype`, or `torch_dtype` in older files; None if the file states no dtype or "auto"."""
    name = "dtype" if "dtype" in config else "torch_dtype"
    given = config.text(name, "auto").removeprefix("torch.")
    if given != "auto" and given not in _DTYPE_NAMES:
        raise config.fault(name, f"one of {', '.join(_DTYPE_NAMES)}", "set it to the dtype that the model shall have")
    return _DTYPE_NAMES.get(given)


def read_layer_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, from `layer_types` or else `max_window_layers` (Qwen2, Qwen3).

    As in transformers, an absent `sliding_window` means 4096 tokens, and null means no window.
    """
    has_windows = config.flag("use_sliding_window", False)
    window = read_window(config) if has_windows else None
    first = config.count("max_window_layers", 28, minimum=0)
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    kinds = read_layer_types(config, default)
    if "sliding_attention" in kinds and not has_windows:
        raise config.fault("layer_types", "no sliding_attention, because use_sliding_window is false")
    return windows_of(config, kinds, window)


def read_alternating_windows(config: Fields, period: int) -> tuple[int | None, ...]:
    """Return the window of each layer, from `layer_types`. By default, every `period`-th layer has no window."""
    kinds = read_layer_types(config, ["sliding_attention" if (index + 1) % period else "full_attention"
                                      for index in range(layer_count(config))])
    return windows_of(config, kinds, read_window(config))


def read_uniform_windows(config: Fields, window: int | None) -> tuple[int | None, ...]:
    """Return `window` for each layer, for a family that ignores `layer_types`.

    Raises ModelLoadError if `layer_types` states other windows, because the file then describes another model.
    """
    num_layers, kind = layer_count(config), "full_attention" if window is None else "sliding_attention"
    if set(read_layer_types(config, [kind] * num_layers)) != {kind}:
        raise config.fault("layer_types", f"{kind} for every layer, to match sliding_window")
    return (window,) * num_layers


def windows_of(config: Fields, kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, `window` for sliding_attention and None for full_attention.

    kinds    the field `layer_types`, or its default
    window   the field `sliding_window`; None: the field is null
    """
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fault("layer_types", "only full_attention and sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise config.fault("sliding_window", "a number of tokens, because layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_softcap(config: Fields, name: str, default: float | None) -> float | None:
    """Return the softcap in the field `name`: `default` if the field is absent, None if it is null."""
    return config.number(name, None if name in config.values else default)


def read_window(config: Fields) -> int | None:
    """Return the field `sliding_window`, in tokens: 4096 if the field is absent, None if it is null."""
    return config.count("sliding_window", None if "sliding_window" in config.values else 4096)


def read_layer_types(config: Fields, default: list[str]) -> list[str]:
    """Return the field `layer_types`, or `default` if the file has none.

    Raises ModelLoadError if the field does not have as many entries as `default`, which has one for each layer.
    """
    kinds = config.texts("layer_types", default)
    if len(kinds) != len(default):
        raise config.fault("layer_types", f"{counted(len(default), 'entry', 'entries')}, one for each layer")
    return kinds


def without_windows(config: Fields, name: str = "num_hidden_layers") -> tuple[None, ...]:
    """Return None for each layer, for a family without windows. Raises ModelLoadError if `config` has windows.

    name   name of the field with the number of layers
    """
    num_layers = layer_count(config, name)
    if "sliding_window" in config and config.flag("use_sliding_window", True) and (
            config.count("sliding_window") < config.count("max_position_embeddings", MAX_POSITIONS)):
        raise config.fault("sliding_window", "null, because this architecture has no sliding windows")
    if set(read_layer_types(config, ["full_attention"] * num_layers)) != {"full_attention"}:
        raise config.fault("layer_types", "only full_attention, because this architecture has no other layers")
    return (None,) * num_layers


def refuse_rope_scaling(config: Fields) -> None:
    """Raise ModelLoadError if `config` scales rotary positions.

    The function is for model families without rotary positions, and for families whose rotary positions cannot be
    scaled.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.fields(name, Fields({}, config.where))
        if rope.text("rope_type", rope.text("type", "default")) != "default":
            raise config.fault(name, "null, because this architecture has no scaled rotary positions")


def read_rotary(config: Fields, max_positions: int, default_theta: float | None = None,
                is_partial: bool = False, rope: Fields | None = None) -> RotaryParameters:
    """Read the rotary parameters from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`.

    default_theta   base of the rotary frequencies if the file has no `rope_theta`; None: the file must have the field
    is_partial      whether the family can rotate a part of each head; False: a file that rotates a part is refused
    rope            the parameters to read, for a family with several sets; None: those in the fields named above
    """
    rope = _rope_fields(config) if rope is None else rope
    if not is_partial and "partial_rotary_factor" in rope and rope.number("partial_rotary_factor") != 1.0:
        raise rope.fault("partial_rotary_factor", "1, because this model class rotates whole heads")
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    if theta is None:
        raise config.missing("rope_theta", *_NO_DEFAULT)
    kind = rope.text("rope_type", rope.text("type", "default"))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "original_max_position_embeddings",
             "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"} | ({"short_factor", "long_factor"} if kind == "longrope" else set())
    unknown = sorted(name for name in rope.values.keys() - known if name in rope
                     and not _changes_nothing(rope.values[name], _NEUTRAL_IN_ROPE.get(name, ())))
    if kind not in (*KINDS, "dynamic"):
        raise ModelLoadError(f"{rope.where}: the rotary embedding has type {kind!r}",
                             f"expected one of {', '.join(KINDS)}, dynamic",
                             "use a model with one of these types")
    if unknown:
        raise rope.fault(unknown[0], "no value, because the engine does not read this field",
                         "use a model without this field")
    without_effect = [name for name, read_by in _READ_BY_SOME_KINDS.items()
                      if kind not in read_by and rope.values.get(name, 1) not in (1, None)]
    if "rope_type" in rope and "type" in rope and rope.values["type"] != kind:
        without_effect.append("type")
    for name in without_effect:
        log.warning("%s: %s is %s and has no effect, as in transformers, because the rotary embedding has type %s",
                    rope.where, name, shown(rope.values[name]), shown(kind))
    if kind == "dynamic":
        rope.number("factor")                     # only checked: it applies to positions beyond the model's own
    if kind in ("default", "dynamic"):
        return RotaryParameters(theta=theta)
    if kind == "linear":
        return RotaryParameters(kind=kind, theta=theta, factor=rope.number("factor"))

    # As in transformers, a top-level value takes precedence over a value in the rope parameters.
    original = config.whole_number("original_max_position_embeddings", rope.whole_number(
        "original_max_position_embeddings", max_positions, maximum=MAX_POSITIONS), maximum=MAX_POSITIONS)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise rope.fault("high_freq_factor", f"more than low_freq_factor, {low:g}")
        return RotaryParameters(kind=kind, theta=theta, factor=rope.number("factor"), original_max_positions=original,
                                low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        factor = rope.number("factor", max_positions / original)
        rope.numbers("long_factor")               # only checked: it applies to sequences longer than the engine runs
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        return RotaryParameters(kind=kind, theta=theta, factor=factor, original_max_positions=original,
                                short_factors=tuple(rope.numbers("short_factor")),
                                amplitude=rope.number("attention_factor", amplitude))
    if theta <= 1.0:
        raise rope.fault("rope_theta", "more than 1 with yarn")
    factor = rope.number("factor")
    return RotaryParameters(
        kind=kind, theta=theta, factor=factor, original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0), beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True), amplitude=_yarn_amplitude(rope, factor))


def rope_fields_by_kind(config: Fields) -> tuple[Fields, Fields]:
    """Return the rotary parameters of the layers with full attention, and those of the layers with sliding windows.

    This function is for families whose two kinds of layers have different rotary tables.

    `rope_parameters` contains the parameters by kind of layer. Older files have `rope_scaling`, which applies to layers
    with full attention only.
    """
    nothing = Fields({}, config.where)
    by_kind = config.fields("rope_parameters", nothing)
    unknown = sorted(name for name in by_kind.values.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise by_kind.fault(unknown[0], "no value, because this architecture has only full_attention and "
                                        "sliding_attention in rope_parameters")
    older = config.fields("rope_scaling", nothing)
    if older.values and by_kind.values:
        raise config.fault("rope_scaling", "null, because the file has rope_parameters")
    if "type" in older and "rope_type" not in older:
        raise older.fault("type", "no value, because this architecture uses the name rope_type")
    full, sliding = by_kind.fields("full_attention", older), by_kind.fields("sliding_attention", nothing)
    for rope in (full, sliding):
        if not rope.flag("truncate", True):            # transformers ignores the field here
            raise rope.fault("truncate", "true or no value")
    return full, sliding


def _rope_fields(config: Fields) -> Fields:
    """Return the field `rope_scaling`, or else `rope_parameters`, its newer name; empty if both are absent."""
    rope = config.fields("rope_scaling", Fields({}, config.where))
    return rope if rope.values else config.fields("rope_parameters", rope)


def _epsilon(config: Fields, name: str, default: float | None) -> float:
    epsilon = config.number(name, default)
    if epsilon is None:
        raise config.missing(name, *_NO_DEFAULT)
    return epsilon


def _rotary_size(config: Fields, head_size: int, default: float) -> int:
    """Return the number of leading entries of a head that are rotated."""
    factor = _rope_fields(config).number("partial_rotary_factor", config.number("partial_rotary_factor", default))
    size = int(head_size * factor)
    if not 0 < size <= head_size or size % 2:
        raise ModelLoadError(f"{config.where}: partial_rotary_factor is {factor:g} and the head size is {head_size}",
                             f"expected an even number of rotated entries, from 2 to {head_size}",
                             "check head_dim and partial_rotary_factor")
    return size


def _check_short_factors(config: Fields, rotary: RotaryParameters, size: int) -> None:
    if len(rotary.short_factors) != size // 2:
        found = counted(len(rotary.short_factors), "number")
        raise ModelLoadError(f"{_rope_fields(config).where}: short_factor has {found}",
                             f"expected {size // 2}, one for each frequency", "check head_dim and short_factor")


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
