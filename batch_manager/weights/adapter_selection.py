"""Which modules the configuration of a peft adapter selects: target_modules, exclude_modules and layers_to_transform.

The rules are those of peft. A regular expression of a file is not given to `re`, in which it could take forever: it is
matched here, in time proportional to its length, and refused if it uses more than the syntax below.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ..errors import ModelLoadError
from .json_file import Fields, shown

ALL_LINEAR = "all-linear"
LONGEST_EXPRESSION = 2_000
DEEPEST_GROUPS = 50
# One character with a repetition, a border, or a part of a group.
_ITEM = re.compile(r"(?P<one>\[\^?(?:\\[dw.\-]|[\w.](?:-\w)?)+-?\]|\\[dw.\-_]|[\w.\-])"
                   r"(?P<times>(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??)?|\\b|\((?:\?:)?|[|)^$]", re.ASCII)
_SYNTAX = ("a regular expression of characters, classes, repetitions of one of them, and groups of alternatives "
           "without a repetition")
_LAYERS_PATTERN = re.compile(r"[\w.\-]+", re.ASCII)


class Selection:
    """The modules that the fields of adapter_config.json select. Raises ModelLoadError for an invalid field."""

    def __init__(self, config: Fields) -> None:
        self._config = config
        self._targets = _names(config, "target_modules")
        if not self._targets:
            raise config.fault("target_modules", "names of modules, as peft writes them", "save the adapter again")
        self._excluded = _names(config, "exclude_modules")
        self._layers = _layers(config)
        patterns = config.values.get("layers_pattern") or []
        self._layers_patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(self._layers_patterns, list) or not all(
                isinstance(pattern, str) and _LAYERS_PATTERN.fullmatch(pattern) for pattern in self._layers_patterns):
            raise config.fault("layers_pattern", "names of lists of layers", "write each name")
        if isinstance(self._targets, str) and self._layers is not None:
            raise config.fault("layers_to_transform", "no value beside a string of target_modules, as in peft",
                               "write target_modules as a list")

    def check(self, module: str, tensor: str) -> None:
        """Raise ModelLoadError, which names field and tensor, if the module of a tensor is not selected."""
        if self._excluded and self._matches("exclude_modules", self._excluded, module):
            raise self._fault("exclude_modules", tensor)
        if not self._matches("target_modules", self._targets, module):
            raise self._fault("target_modules", tensor)
        if isinstance(self._targets, frozenset) and module in self._targets:
            return                             # a whole path: peft does not look at the layers
        if self._layers is not None and self._layer_of(module) not in self._layers:
            raise self._fault("layers_to_transform", tensor)

    def _matches(self, field: str, selected: str | frozenset[str], module: str) -> bool:
        if isinstance(selected, frozenset):
            words = module.split(".")
            return any(".".join(words[first:]) in selected for first in range(len(words)))
        if field == "target_modules" and selected.lower() == ALL_LINEAR:
            return True
        try:
            return matches(selected, module)
        except (ValueError, re.error):
            raise self._config.fault(field, f"a list of names, or {_SYNTAX}",
                                     "write the names of the modules") from None

    def _layer_of(self, module: str) -> int | None:
        for pattern in self._layers_patterns:
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module, re.ASCII):
                return int(match[1])
        match = None if self._layers_patterns else re.match(r".*?\.[^.]*\.(\d+)\.", module, re.ASCII)
        return None if match is None else int(match[1])

    def _fault(self, field: str, tensor: str) -> ModelLoadError:
        return ModelLoadError(f"{self._config.where}: {field} leaves out the module of tensor {shown(tensor)}",
                              "expected tensors of selected modules only, because peft ignores the others",
                              f"correct {field}, or save the adapter again")


def _names(config: Fields, field: str) -> Any:
    """Return a set of names, or an expression; None if the field is absent or null."""
    value = config.values.get(field)
    if value is not None and not isinstance(value, str) and not (
            isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise config.fault(field, "a list of names, or a string", "save the adapter again")
    return frozenset(value) if isinstance(value, list) else value


def _layers(config: Fields) -> list[int] | None:
    value = config.values.get("layers_to_transform")
    layers = [value] if type(value) is int else value or None
    if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
        raise config.fault("layers_to_transform", "the number of a layer, or a list of them", "save the adapter again")
    return layers


def matches(expression: str, text: str) -> bool:
    """Return whether the whole text matches, as re.fullmatch does. Takes expression length times text length steps.

    Raises ValueError or re.error for an expression beyond the syntax, or too long.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError
    items = _items(expression)
    ends, last = _ends(items, text, {0}, 0)
    if last is not None:
        raise ValueError
    return len(text) in ends


def _items(expression: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(expression):
        item = _ITEM.match(expression, at)
        if item is None:
            raise ValueError
        yield item
        at = item.end()


def _ends(items: Iterator[re.Match[str]], text: str, starts: set[int], depth: int) -> tuple[set[int], str | None]:
    """Match alternatives up to the end of their group. Returns where matches from `starts` end, and the last sign."""
    if depth > DEEPEST_GROUPS:
        raise ValueError
    ends, now = set[int](), starts
    for item in items:
        sign = item[0]
        if item["one"] is not None:
            now = _repeated(item["one"], item["times"] or "{1}", text, now)
        elif sign == "|":
            ends, now = ends | now, starts
        elif sign == ")":
            return ends | now, sign
        elif sign in (r"\b", "^", "$"):
            now = {at for at in now if re.compile(sign).match(text, at)}
        else:
            now, last = _ends(items, text, now, depth + 1)
            if last != ")":
                raise ValueError
    return ends | now, None


def _repeated(one: str, times: str, text: str, starts: set[int]) -> set[int]:
    """Return where matches of `one`, repeated, end."""
    least, most = {"*": (0, len(text)), "+": (1, len(text)), "?": (0, 1)}.get(times[0], (0, 0))
    if times[0] == "{":
        low, comma, high = times[1 : times.index("}")].partition(",")
        least, most = int(low), int(high) if high else len(text) if comma else int(low)
    fits = [_fits(one, sign) for sign in text]
    ends, now = set[int](), starts
    for number in range(min(most, len(text)) + 1):
        if number >= least:
            if now <= ends:
                break
            ends = ends | now
        now = {at + 1 for at in now if at < len(text) and fits[at]}
    return ends


@lru_cache(10_000)
def _fits(one: str, sign: str) -> bool:
    return re.fullmatch(one, sign) is not None
