"""JSON objects from untrusted files, bounded and without duplicate keys, and typed access to their fields."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

# A parsed value takes up to 200 bytes, and a parsed string four times its size in the file. With both bounds, no file
# costs more than 64 MiB in addition to its own size. The index of a model with 4,096 layers stays below both bounds.
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_JSON_VALUES = 200_000
MAX_COUNT = 2**40                    # bound of every size in a configuration; a product of two is finite in float32
MAX_NUMBER = 1e30                    # bound of other numbers; it and 1 / MIN_NUMBER are finite in float32
MIN_NUMBER = 1e-30

READABLE = ("expected a readable file", "check the permissions of the file and the state of its disk")
AGAIN = "download or save the checkpoint again"

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong, _short.maxlist, _short.maxdict = 2, 120, 40, 4, 4


def shown(value: object) -> str:
    """Format a value for a message. The text is short, even if the value is large or deeply nested."""
    return _short.repr(value)


def shown_entry(values: Mapping[str, Any], name: str) -> str:
    """Format an entry of a file's metadata for a message: "missing", "null", or its value."""
    if name not in values:
        return "missing"
    return "null" if values[name] is None else shown(values[name])


def read_json_file(path: Path, where: str) -> dict[str, Any]:
    """Read the JSON object in a file. Raises ModelLoadError, which names `where`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as fault:
        raise ModelLoadError(f"{where} cannot be read ({fault.strerror})", *READABLE) from None
    return parse_json(data, where)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object in `data`. Raises ModelLoadError, which names `where`."""
    if len(data) > MAX_JSON_BYTES:
        raise ModelLoadError(f"{where} is larger than {MAX_JSON_BYTES:,} bytes", "expected JSON within this limit")
    num_values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if num_values > MAX_JSON_VALUES:
        raise ModelLoadError(f"{where} has {num_values:,} values", f"expected at most {MAX_JSON_VALUES:,}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise ModelLoadError(f"{where} is nested too deeply", "expected a JSON object of a few levels") from None
    except ValueError as fault:         # from json, the UTF-8 decoder, and the two functions below
        raise ModelLoadError(f"{where} is not valid JSON ({fault})", "expected a JSON object", AGAIN) from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where} has a value of type {type(value).__name__} at its top level",
                             "expected a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return fields


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


class Fields:
    """Typed access to a JSON object. An absent or null field takes the default; without a default it is an error.

    asked_for   names of the fields that were read
    nested      name of each field that was read as an object -> its Fields

    Methods raise ModelLoadError, which names the file and the field.
    """

    _REQUIRED: Any = object()

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.asked_for: set[str] = set()
        self.nested: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.values.get(name) is not None

    def replaced(self, values: dict[str, Any]) -> "Fields":
        """Return fields with other values. What is read of them counts as read in these fields."""
        replaced = Fields(values, self.where)
        replaced.asked_for, replaced.nested = self.asked_for, self.nested
        return replaced

    def fault(self, name: str, expected: str, fix: str = "") -> ModelLoadError:
        """Return the error to raise for an invalid value of a field.

        expected   the words after "expected" in the message
        """
        return ModelLoadError(f"{self.where}: {_name(name)} is {shown_entry(self.values, name)}",
                              f"expected {expected}", fix)

    def missing(self, name: str, expected: str,
                fix: str = f"{AGAIN}, or set the field") -> ModelLoadError:
        """Return the error to raise for a field that is absent or null.

        expected   the words after "expected" in the message
        """
        return self.fault(name, expected, fix)

    def count(self, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = MAX_COUNT) -> Any:
        """Return the value of a field that must be an integer in `minimum`..`maximum`."""
        return self._get(name, default, lambda value: isinstance(value, int) and minimum <= value <= maximum,
                         f"an integer in {minimum:,}..{maximum:,}")

    def whole_number(self, name: str, default: Any, maximum: int) -> Any:
        """Return the value, as an integer, of a field that must be a whole number in 1..`maximum`, such as 64 or 64.0.

        The method is for fields that transformers computes with, which may be stored as floats.
        """
        value = self._get(name, default, lambda value: isinstance(value, int | float) and 1 <= value <= maximum
                          and value == int(value), f"a whole number in 1..{maximum:,}")
        return None if value is None else int(value)

    def counts(self, name: str, lengths: range) -> list[int]:
        """Return the value of a field that must be a list of integers >= 0, with a length in `lengths`."""
        return self._get(name, Fields._REQUIRED,
                         lambda value: isinstance(value, list) and len(value) in lengths
                         and all(type(item) is int and 0 <= item <= MAX_COUNT for item in value),
                         f"a list of {lengths[0] if len(lengths) == 1 else f'{lengths[0]}..{lengths[-1]}'} integers in "
                         f"0..{MAX_COUNT:,}")

    def numbers(self, name: str) -> list[float]:
        """Return the value of a field that must be a list of numbers in MIN_NUMBER..MAX_NUMBER, as floats."""
        return [float(item) for item in self._get(
            name, Fields._REQUIRED, lambda value: isinstance(value, list) and all(
                type(item) in (int, float) and MIN_NUMBER <= item <= MAX_NUMBER for item in value),
            f"a list of numbers in {MIN_NUMBER:g}..{MAX_NUMBER:g}")]

    def number(self, name: str, default: Any = _REQUIRED, minimum: float = MIN_NUMBER) -> Any:
        """Return the value of a field that must be a number in `minimum`..MAX_NUMBER, as a float."""
        value = self._get(name, default,
                          lambda value: isinstance(value, int | float) and minimum <= value <= MAX_NUMBER,
                          f"a number in {minimum:g}..{MAX_NUMBER:g}")
        return float(value) if isinstance(value, int) else value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a field that must be true or false."""
        return self._get(name, default, lambda value: isinstance(value, bool), "true or false", bools=True)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a field that must be a string."""
        return self._get(name, default, lambda value: isinstance(value, str), "a string")

    def texts(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a field that must be a list of strings."""
        return self._get(name, default,
                         lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
                         "a list of strings")

    def fields(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a field that must be an object, as Fields."""
        value = self._get(name, default, lambda value: isinstance(value, dict), "an object")
        if not isinstance(value, dict):
            return value
        fields = Fields(value, f"{self.where}: {_name(name)}")
        if name in self.nested:             # what was read of it before counts
            fields.asked_for, fields.nested = self.nested[name].asked_for, self.nested[name].nested
        self.nested[name] = fields
        return fields

    def _get(self, name, default, is_good, expected, bools=False):
        self.asked_for.add(name)
        value = self.values.get(name)
        if value is None:
            if default is Fields._REQUIRED:
                raise self.missing(name, expected)
            return default
        if isinstance(value, bool) != bools or not is_good(value):
            raise self.fault(name, expected)
        return value


def _name(name: str) -> str:
    """Return a field's name for a message. A long or unprintable name, which comes from the file, is shortened."""
    return name if len(name) <= 120 and name.isprintable() else shown(name)
