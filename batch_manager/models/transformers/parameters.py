"""Loads a model's parameters and buffers from a checkpoint, and computes the buffers that no file stores."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from ...errors import ConfigError, UnsupportedModelError, counted
from ...weights.source import Weights
from .installed import ANOTHER_TYPE, checkpoint_names, first_words


def fill(model: Any, weights: Weights, device: torch.device, dtype: torch.dtype, where: str) -> None:
    """Replace the parameters and buffers of a model on the meta device with real ones.

    The files have the layout in which transformers saves a model. For example, files have one tensor for each expert,
    where the model has a single tensor for all experts.

    Raises   ModelLoadError for tensors that do not fit the model; ConfigError if the model cannot be loaded in `dtype`
    """
    _refuse_other_dtypes(model, dtype, where)
    _compute_buffers(model, device, where)
    tied = dict(model.all_tied_weights_keys)
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, tensor in _from_files(model, stored, tied, weights, where):
        _set(model, name, tensor.to(stored[name].dtype) if not stored[name].is_floating_point() else tensor)
    for name, source in tied.items():
        _set(model, name, model.get_parameter_or_buffer(source))
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if tensor.device.type == "meta"]
    if left:
        raise UnsupportedModelError(f"{where}: the checkpoint leaves {counted(len(left), 'tensor')} of the model "
                                    f"without a value, the first is {left[0]}",
                                    "expected a tensor of the checkpoint for each parameter",
                                    ANOTHER_TYPE)


def _from_files(model: Any, stored: dict[str, torch.Tensor], tied: dict[str, str], weights: Weights, where: str,
                ) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model, tensor from the files) for every parameter and persistent buffer in `stored`.

    tied   name of a parameter without a tensor of its own -> name of the parameter whose tensor it uses
    """
    mapping, loading = checkpoint_names()
    try:
        # Names and shapes in files. The tensors are on the meta device, so nothing is copied.
        in_files = loading.revert_weight_conversion(model, stored)
        conversions = mapping.get_model_conversion_mapping(model, add_legacy=False)
    except Exception as fault:
        raise UnsupportedModelError(f"{where}: transformers cannot tell which names the tensors of "
                                    f"{type(model).__name__} have in a checkpoint ({first_words(fault)})",
                                    "expected a model that transformers can save", ANOTHER_TYPE) from None
    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets: dict[str, list[str]] = {}
    for name, source in tied.items():
        targets.setdefault(source, []).append(name)

    groups: dict[str, list[tuple[str, str]]] = {}
    given: set[str] = set()
    for name in sorted(in_files, key=loading.dot_natural_key):
        if name in stored and weights.has(name):              # stored under the model's own name
            continue
        renamed, pattern = loading.rename_source_key(name, renamings, converters)
        if pattern is not None and not weights.has(renamed):
            groups.setdefault(renamed, []).append((name, pattern))
        elif pattern is None and renamed in stored and not weights.has(renamed):
            given.add(renamed)
            yield renamed, _read(weights, name, renamed, stored[renamed].shape, targets)
    for renamed, parts in groups.items():
        converter = deepcopy(by_pattern[parts[0][1]])
        for name, pattern in parts:
            converter.add_tensor(renamed, name, pattern, weights.tensor(name, in_files[name].shape))
        try:
            made = converter.convert(renamed, model=model, config=model.config)
        except Exception as fault:
            raise UnsupportedModelError(f"{where}: {renamed} cannot be assembled from {parts[0][0]} and others "
                                        f"({first_words(fault)})", "expected tensors saved by transformers",
                                        "save the model again with the newest transformers") from None
        for name, tensor in made.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if name not in stored or tensor.shape != stored[name].shape:
                raise UnsupportedModelError(
                    f"{where}: {name}, assembled from {parts[0][0]} and others, has shape {list(tensor.shape)}",
                    f"expected shape {list(stored[name].shape)}" if name in stored
                    else "the model has no tensor of this name", "save the model again with the newest transformers")
            given.add(name)
            yield name, tensor
    for name in sorted(stored.keys() - given):
        yield name, _read(weights, name, name, stored[name].shape, targets)


def _read(weights: Weights, name: str, name_in_model: str, shape: torch.Size, targets: dict[str, list[str]],
          ) -> torch.Tensor:
    """Read the tensor that the files store as `name`, or under the name of a parameter that shares the tensor.

    targets   name of a parameter -> names of the parameters that share its tensor
    """
    others = targets.get(name_in_model, [])
    if not weights.has(name):
        name = next((other for other in others if weights.has(other)), name)
    tensor = weights.tensor(name, shape)
    for other in others:
        if other != name:
            weights.tied(other, name)
    return tensor


def _set(model: Any, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if last in module._buffers:
        module._buffers[last] = tensor
    else:
        parameter = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, False)
        module._parameters[last] = parameter


def _compute_buffers(model: Any, device: torch.device, where: str) -> None:
    """Let transformers compute the buffers that no file stores. Parameters stay on the meta device.

    Raises UnsupportedModelError if a buffer gets no value.
    """
    buffers = list(model.named_non_persistent_buffers(remove_duplicate=False))
    for name, buffer in buffers:
        _set(model, name, torch.full_like(buffer, _placeholder(buffer.dtype), device=device))
    try:
        with torch.device(device):
            model.initialize_weights()
    except Exception as fault:
        raise UnsupportedModelError(f"{where}: transformers cannot compute the buffers of {type(model).__name__} "
                                    f"({first_words(fault)})", "expected a model that transformers can load",
                                    ANOTHER_TYPE) from None
    for name, _ in buffers:
        buffer = model.get_buffer(name)
        is_unset = buffer.isnan() if buffer.is_floating_point() else buffer == _placeholder(buffer.dtype)
        if buffer.dtype != torch.bool and bool(is_unset.any()):
            raise UnsupportedModelError(f"{where}: transformers does not compute {name} of {type(model).__name__}",
                                        "expected a value for every buffer that no file stores",
                                        ANOTHER_TYPE)


def _placeholder(dtype: torch.dtype) -> float | int | bool:
    """Return the value that marks a buffer as not computed. No computed value equals it, except in boolean buffers."""
    if dtype.is_floating_point:
        return torch.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _refuse_other_dtypes(model: Any, dtype: torch.dtype, where: str) -> None:
    """Raise ConfigError if the model keeps some parameters in float32 and `dtype` is not float32."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    names = [name for name in model.state_dict() if any(part in name for part in kept)]
    if dtype != torch.float32 and names:
        raise ConfigError(f"{where}: {type(model).__name__} keeps {names[0]} in float32, but dtype is "
                          f"{str(dtype).removeprefix('torch.')}", "expected one dtype for the whole model",
                          'set dtype="float32"')
