"""The oracle of adapter folders: judges their files by independent rules, without the code of the product."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .adapter_cases import CONFIG, FIELDS, PATTERNS, PREFIX, PROJECTIONS, TENSORS
from .config_rules import Unsure
from .entries import Entry
from .rules import ELEMENT_BYTES, Bad, Broken, Good, _content, _label, in_float32, parse_json, read_tensors

# What may have any value; what must be absent or empty; the others are read.
FREE = ("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
        "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
        "revision", "task_type")
SELECTING = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
READ = ("r", "lora_alpha", "peft_type", "use_rslora", "bias", "init_lora_weights", *PATTERNS, *SELECTING)
EMPTY = tuple(name for name in FIELDS if name not in FREE and name not in READ)


def judge(model: str, files: Mapping[str, Entry]) -> Good | Bad | None:
    """Return the verdict on a folder; None if the rules do not decide. `Good.tensors`: "id layer" -> the row."""
    try:
        return _judge(PROJECTIONS[model], files)
    except Unsure:
        return None


def _judge(projections: Mapping[str, Any], files: Mapping[str, Entry]) -> Good | Bad:
    try:
        config = parse_json(_content(files, CONFIG)[1])
    except Broken as broken:
        return Bad([(_label(files, CONFIG), field) for field in broken.fields])
    if faults := _wrong_fields(config):
        missing = [] if TENSORS in files else [("", TENSORS)]
        return Bad([*((CONFIG, field) for field in Broken(*faults).fields), *missing])
    try:
        tensors = read_tensors(_content(files, TENSORS)[1])
    except Broken as broken:
        return Bad([(_label(files, TENSORS), field) for field in broken.fields])
    left, rows, faults = dict(tensors), {}, []
    unselected = [(CONFIG, name) for name in _wrong_selection(config)]
    for module, (layer, ids, inputs, outputs) in projections.items():
        names = [f"{PREFIX}{module}.lora_{letter}.weight" for letter in "AB"]
        found = [left.pop(name) for name in names if name in left]
        if not found:
            continue
        unselected += [(CONFIG, name) for name in _leaving_out(config, module, layer)]
        rank = _of_module(config, "rank_pattern", "r", module)
        alpha = _of_module(config, "alpha_pattern", "lora_alpha", module)
        if len(found) == 1 or [shape for _, shape, _ in found] != [(rank, inputs), (sum(outputs), rank)] or any(
                dtype not in ELEMENT_BYTES for dtype, _, _ in found):
            faults += names
            continue
        with np.errstate(all="ignore"):
            a, b = (in_float32(*one) for one in found)
            b = b * np.float32(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
        if not np.isfinite(a).all() or not np.isfinite(b).all():
            faults += names
        for number, part in zip(ids, np.split(b, np.cumsum(outputs)[:-1])):
            rows[f"{number} {layer}"] = np.concatenate([a.ravel(), part.ravel()])
    faults += left
    if unselected or faults or not rows:
        return Bad(unselected + [(TENSORS, field) for field in (faults if unselected else Broken(*faults).fields)])
    return Good({}, rows)


def _wrong_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields that an adapter must not have with these values, or must not lack."""
    wrong = [name for name in config if name not in FIELDS]
    wrong += [name for name in EMPTY if config.get(name) not in (None, False, [], {})]
    initial = config.get("init_lora_weights")
    if initial is not None and initial is not True and initial is not False and initial not in (
            "gaussian", "eva", "orthogonal"):
        wrong.append("init_lora_weights")
    if config.get("peft_type") != "LORA":
        wrong.append("peft_type")
    if config.get("bias") not in (None, "none"):
        wrong.append("bias")
    if config.get("use_rslora") is not None and type(config["use_rslora"]) is not bool:
        wrong.append("use_rslora")
    wrong += [] if _is_rank(config.get("r")) else ["r"]
    wrong += [] if _is_number(config.get("lora_alpha")) else ["lora_alpha"]
    for name, is_good in zip(PATTERNS, (_is_rank, _is_number)):
        patterns = config.get(name) or {} if config.get(name) is None else config[name]
        if type(patterns) is not dict or not all(
                re.fullmatch(r"\^?[A-Za-z0-9_.-]+", key) and is_good(value) for key, value in patterns.items()):
            wrong.append(name)
    return wrong


def _wrong_selection(config: Mapping[str, Any]) -> list[str]:
    """Return the fields whose values select nothing or are not of peft's types. Expressions are not judged."""
    targets, excluded, layers, patterns = (config.get(name) for name in SELECTING)
    if isinstance(targets, str) and targets.lower() != "all-linear" or excluded and isinstance(excluded, str):
        raise Unsure
    wrong = [] if targets and (isinstance(targets, str) or _is_list(targets, str)) else ["target_modules"]
    wrong += [] if not excluded and isinstance(excluded, list | str | None) or _is_list(excluded, str) else [
        "exclude_modules"]
    if patterns:
        raise Unsure
    wrong += [] if layers in (None, []) or type(layers) is int or _is_list(layers, int) else ["layers_to_transform"]
    return wrong + (["layers_to_transform"] if isinstance(targets, str) and layers not in (None, []) else [])


def _leaving_out(config: Mapping[str, Any], module: str, layer: int) -> list[str]:
    """Return the fields by which peft would ignore the tensors of a module."""
    targets, excluded, layers, _ = (config.get(name) for name in SELECTING)
    selected = targets == "all-linear" or _is_list(targets, str) and any(
        f".{module}".endswith(f".{name}") for name in targets)
    found = [] if selected else ["target_modules"]
    found += ["exclude_modules"] if _is_list(excluded, str) and any(
        f".{module}".endswith(f".{name}") for name in excluded) else []
    if _is_list(targets, str) and module in targets:
        return found
    return found + (["layers_to_transform"] if layers not in (None, [], layer) and not (
        _is_list(layers, int) and layer in layers) else [])


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1024


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e30 <= value <= 1e30


def _of_module(config: Mapping[str, Any], patterns: str, name: str, module: str) -> Any:
    for pattern, value in (config.get(patterns) or {}).items():
        path = pattern.removeprefix("^")
        if module == path or pattern == path and module.endswith(f".{path}"):
            return value
    return config[name]
