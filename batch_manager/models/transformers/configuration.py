"""Turns an untrusted config.json into a configuration object of transformers."""

import inspect
from typing import Any

from ...errors import ModelLoadError, UnsupportedModelError
from ...weights.json_file import Fields, shown
from ..spec_reading import MAX_HEADS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH
from .installed import ANOTHER_TYPE, SAVED_BY_ANOTHER_VERSION, first_words, transformers
from .proven_types import PROVEN

MOST_LAYERS = 512                # bounds time and memory: each layer is many Python objects, created twice
LARGEST_INTEGER = 2**24          # bound of all integers except the base of rotary frequencies

# Fields that change the computation in a way that the engine does not support -> the value that changes nothing.
_REFUSED = {"auto_map": None, "quantization_config": None, "compression_config": None, "per_layer_config": {},
            "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}, "prune_heads": {},
            "text_config": {}, "adapter_config": None}
# Fields that are not passed to transformers. They do not change what a model computes, or they change how transformers
# runs it. `num_labels` would create a table of that many entries.
_DROPPED = {"architectures", "attn_implementation", "experts_implementation", "num_labels", "id2label", "label2id",
            "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_return_dict",
            "torchscript", "use_cache", "use_bfloat16", "chunk_size_feed_forward", "gradient_checkpointing",
            "transformers_version", "dtype", "torch_dtype", "task_specific_params", "problem_type", "name_or_path",
            "tokenizer_class", "finetuning_task", "generation_config", "kernel_config", "use_kernels",
            "use_mamba_kernels", "is_decoder"}
_LISTS_OF_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_types")
_SIZES = (("num_hidden_layers", MOST_LAYERS), ("hidden_size", MAX_WIDTH), ("vocab_size", MAX_VOCAB),
          ("num_attention_heads", MAX_HEADS))


def make_configuration(config: Fields, model_type: str) -> Any:
    """Create transformers' configuration object for `model_type`, one of the tested model types in PROVEN.

    Raises ModelLoadError, which names file and field, if a field has an unsupported value or a size is too large.
    """
    for name, neutral in _REFUSED.items():
        if name in config and config.values[name] != neutral:
            raise UnsupportedModelError(f"{config.where}: {name} is {shown(config.values[name])}",
                                        "expected no value, because the field is not supported through transformers",
                                        "save the model without it, with the newest transformers")
    _refuse_large_numbers(config.values, config.where)
    configuration_class = transformers().CONFIG_MAPPING[model_type]
    # Fields with a leading underscore control how transformers runs a model, unless the class declares them (OPT).
    declared = inspect.signature(configuration_class).parameters
    values = {name: value for name, value in config.values.items()
              if name not in _DROPPED and name not in _REFUSED and (name in declared or not name.startswith("_"))}
    for name, most in _SIZES:
        own_name = configuration_class.attribute_map.get(name, name)
        for given in {name, own_name} & values.keys():
            config.count(given, None, maximum=most)
    try:
        made = configuration_class(**values)
    except Exception as fault:
        raise ModelLoadError(f"{config.where}: transformers rejects it as a configuration of type {model_type!r} "
                             f"({first_words(fault)})", "expected a configuration saved by transformers",
                             SAVED_BY_ANOTHER_VERSION) from None
    made.use_cache = False
    for name, most in _SIZES:
        size = getattr(made, name, None)
        if size is None and name == "num_attention_heads":      # some families count heads in other fields
            continue
        if type(size) is not int or not 1 <= size <= most:
            raise ModelLoadError(f"{config.where}: {name} is {shown(size)}", f"expected an integer in 1..{most:,}",
                                 f"correct the file, or {ANOTHER_TYPE}")
    return made


def most_positions(configuration: Any, where: str) -> int | None:
    """Return the number of positions that the model supports; None if the configuration does not state it.

    With longrope, this is the number of positions before scaling. In a longer sequence, the keys of earlier tokens
    would change.
    """
    positions = getattr(configuration, "max_position_embeddings", None)
    if positions is None:
        return None
    if type(positions) is not int or not 1 <= positions <= MAX_POSITIONS:
        raise UnsupportedModelError(f"{where}: max_position_embeddings is {shown(positions)}",
                                    f"expected an integer in 1..{MAX_POSITIONS:,}",
                                    "add the number of positions to the file")
    for rope in _ropes(getattr(configuration, "rope_parameters", None)):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and type(original) in (int, float) and original > 0:
            positions = min(positions, int(original))
    return positions


def kinds_of(configuration: Any) -> set[str]:
    """Return the kinds of layers that a configuration names, such as "layer_types: sliding_attention"."""
    kinds = set()
    for name in _LISTS_OF_KINDS:
        found = getattr(configuration, name, None)
        if isinstance(found, list | tuple):
            kinds.update(f"{name}: {kind}" for kind in found)
    return kinds


def refuse_untested_kinds(configuration: Any, where: str) -> None:
    """Raise UnsupportedModelError for a kind of layer that was never tested with the model type."""
    tested = PROVEN.get(configuration.model_type, ())
    untested = sorted(kinds_of(configuration) - set(tested))
    if untested:
        raise UnsupportedModelError(f"{where}: {shown(untested[0])} was not tested with model type "
                                    f"{configuration.model_type!r}",
                                    f"expected one of {', '.join(tested)}" if tested
                                    else "expected a configuration without such fields",
                                    "use a model without such layers")


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """Return all sets of rotary parameters: `parameters`, and each dict among its values (a set for one kind of layer).

    The list is empty if `parameters` is not a dict.
    """
    if not isinstance(parameters, dict):
        return []
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _refuse_large_numbers(values: dict[str, Any], where: str) -> None:
    """Raise ModelLoadError for an integer, at any depth, that is too large to be a size of a model."""
    left: list[tuple[str, Any]] = list(values.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left.extend(value.items())
        elif isinstance(value, list):
            left.extend((name, item) for item in value)
        elif type(value) is int and abs(value) > LARGEST_INTEGER and "theta" not in name and "base" not in name:
            raise ModelLoadError(f"{where}: {name if len(name) <= 120 else shown(name)} is or contains {shown(value)}",
                                 f"expected integers of at most {LARGEST_INTEGER:,}",
                                 "check that config.json belongs to this checkpoint")
