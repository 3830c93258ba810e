"""Checks of a registered model class and of the spec that it returns. Errors name the class, not a file."""

import inspect
import re
from collections.abc import Iterable

from ..attention.interface import LayerAttention
from ..errors import ConfigError, counted, type_name
from ..layers.rotary import RotaryParameters
from ..weights.json_file import shown
from .spec import DTYPES, ModelSpec

_METHODS = ("read_spec", "embed", "forward", "logits")
_SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size", "intermediate_size", "vocab_size",
          "max_position_embeddings")
_FLAGS = ("tie_word_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "gated_mlp")
_COLLECTIONS = (tuple, list, set, frozenset)


def refuse_wrong_class(model_class: object) -> None:
    """Raise ConfigError unless `model_class` is a class with valid members of models.registry.Model."""
    if not isinstance(model_class, type):
        raise ConfigError(f"register_model got an object of type {type_name(model_class)}",
                          "expected a class, which the engine instantiates", "pass the class itself")
    name = model_class.__name__
    missing = [member for member in ("harmless_tensors", *_METHODS) if getattr(model_class, member, None) is None]
    if missing:
        raise ConfigError(f"{name} has no {', '.join(missing)}",
                          "expected a class with the members of models.registry.Model",
                          "")
    for member in _METHODS:
        if not callable(getattr(model_class, member)):
            raise ConfigError(f"{name}.{member} is {shown(getattr(model_class, member))}", "expected a method", "")
    _refuse_read_spec(model_class)
    for member in ("understands", "ignores"):
        _refuse_no_strings(name, member, getattr(model_class, member, ()), "field names")
    _refuse_no_strings(name, "harmless_tensors", model_class.harmless_tensors, "patterns of tensor names")
    for pattern in model_class.harmless_tensors:
        try:
            re.compile(pattern)
        except re.error as fault:
            raise ConfigError(f"{name}.harmless_tensors contains {shown(pattern)}, which is not valid ({fault})",
                              "expected regular expressions", "") from None
    deterministic = getattr(model_class, "deterministic", False)
    if not isinstance(deterministic, bool):
        raise ConfigError(f"{name}.deterministic is {shown(deterministic)}", "expected True or False", "")


def _refuse_read_spec(model_class: type) -> None:
    """Raise ConfigError unless `read_spec` can be called on the class: the engine calls it without an instance."""
    try:
        signature = inspect.signature(model_class.read_spec)
    except (TypeError, ValueError):                    # a callable that is not written in Python
        return
    try:
        signature.bind("config", "architecture")
    except TypeError:
        raise ConfigError(f"{model_class.__name__}.read_spec takes {signature}",
                          "expected a static method that takes (config, architecture)",
                          "add @staticmethod, or correct the parameters") from None


def _refuse_no_strings(class_name: str, member: str, value: object, what: str) -> None:
    if not isinstance(value, _COLLECTIONS) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{class_name}.{member} is {shown(value)}", f"expected a tuple of strings: {what}", "")


def refuse_wrong_spec(model_class: type, spec: object) -> None:
    """Raise ConfigError unless `spec` is a ModelSpec with valid fields. `check_spec` checks that they fit together."""
    name = f"{model_class.__name__}.read_spec"
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"{name} returned {shown(spec)}", "expected a ModelSpec", "")
    for field, expected, is_valid in _fields(spec):
        if not is_valid:
            raise ConfigError(f"{name} returned a spec whose {field} is {shown(getattr(spec, field))}",
                              f"expected {expected}", "")
    if len(spec.attention) != spec.num_layers:
        raise ConfigError(f"{name} returned a spec with {counted(spec.num_layers, 'layer')} and "
                          f"{counted(len(spec.attention), 'entry', 'entries')} in "
                          "attention", "expected one entry for each layer", "")
    for layer, how in enumerate(spec.attention):
        if how.alibi_slopes is not None and len(how.alibi_slopes) != spec.num_heads:
            raise ConfigError(f"{name} returned a spec with {counted(spec.num_heads, 'head')} and "
                              f"{len(how.alibi_slopes)} alibi_slopes in layer {layer}",
                              "expected one slope for each query head", "")


def _fields(spec: ModelSpec) -> Iterable[tuple[str, str, bool]]:
    """Yield (name of a field of the spec, description of the valid values, whether the field's value is valid)."""
    for field in _SIZES:
        size = getattr(spec, field)
        yield field, "an integer above 0", isinstance(size, int) and not isinstance(size, bool) and size > 0
    for field in _FLAGS:
        yield field, "True or False", isinstance(getattr(spec, field), bool)
    are_layers = isinstance(spec.attention, tuple | list) and all(
        isinstance(layer, LayerAttention) for layer in spec.attention)
    yield "attention", "a tuple of LayerAttention, one for each layer", are_layers
    is_number = isinstance(spec.norm_epsilon, int | float) and not isinstance(spec.norm_epsilon, bool)
    yield "norm_epsilon", "a finite number above 0", is_number and 0 < spec.norm_epsilon < float("inf")
    yield "activation", "the name of an activation function", isinstance(spec.activation, str)
    is_rotary = isinstance(spec.rotary, RotaryParameters | None)
    yield "rotary", "RotaryParameters, or None for a model without rotary positions", is_rotary
    size = spec.rotary_size
    is_part = isinstance(size, int) and not isinstance(size, bool) and size % 2 == 0 and 2 <= size <= spec.head_size
    yield "rotary_size", f"None, or an even integer from 2 to the head size, {spec.head_size}", size is None or is_part
    yield "dtype", f"None, or one of {', '.join(DTYPES)}", spec.dtype is None or spec.dtype in DTYPES
