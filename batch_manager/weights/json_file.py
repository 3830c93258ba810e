"""JSON from an untrusted file: bounded, without duplicate keys, an object at the top; and typed access to it."""

import json
import reprlib
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

# Parsed, a value takes up to 200 bytes and a text four times what it takes in the file: both are bounded, so that no
# file costs more than 64 MiB beside its own size. The index of 4,096 layers stays below.
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_JSON_VALUES = 200_000
MAX_COUNT = 2**40                    # no size in a configuration is larger; products of two stay far from overflow
MAX_NUMBER = 1e30                    # and no other number; neither overflows in float32, nor does 1 / MIN_NUMBER
MIN_NUMBER = 1e-30

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong, _short.maxlist, _short.maxdict = 2, 120, 40, 4, 4


def shown(value: object) -> str:
    """The value as a message shows it: short, whatever its size and depth."""
    return _short.repr(value)


def read_json_file(path: Path, where: str) -> dict[str, Any]:
    """The object in the file. Raises ModelLoadError naming `where`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as fault:
        raise ModelLoadError(f"{where} cannot be read ({fault.strerror})") from None
    return parse_json(data, where)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`. Raises ModelLoadError naming `where`."""
    if len(data) > MAX_JSON_BYTES:
        raise ModelLoadError(f"{where} is larger than {MAX_JSON_BYTES:,} bytes", "no checkpoint needs that much JSON")
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise ModelLoadError(f"{where} holds more than {MAX_JSON_VALUES:,} values", "no checkpoint needs so many")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise ModelLoadError(f"{where} is nested too deeply", "a plain JSON object") from None
    except ValueError as fault:         # of JSON, of UTF-8, and the two below
        raise ModelLoadError(f"{where} is not valid JSON ({fault})") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where} holds a {type(value).__name__}", "a JSON object")
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
    """Typed access to a JSON object. A field that is absent or null takes the default; without one it is an error.

    asked_for   the names whose values were read here
    Raises ModelLoadError naming file and field from every method.
    """

    _REQUIRED: Any = object()

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.asked_for: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def fault(self, name: str, expectation: str, fix: str = "") -> ModelLoadError:
        """The error to raise about a field's value."""
        return ModelLoadError(f"{self.where}: {_name(name)} is {shown(self.values.get(name))}", expectation, fix)

    def missing(self, name: str, expectation: str,
                fix: str = "download or save it again, or correct the file") -> ModelLoadError:
        """The error to raise about a field that is absent or null."""
        return ModelLoadError(f"{self.where}: {_name(name)} is missing", expectation, fix)

    def count(self, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = MAX_COUNT) -> Any:
        return self._get(name, default, lambda value: isinstance(value, int) and minimum <= value <= maximum,
                         f"an integer in {minimum:,}..{maximum:,}")

    def counts(self, name: str, lengths: range) -> list[int]:
        """A list of integers, 0 among them, of one of the lengths."""
        return self._get(name, Fields._REQUIRED,
                         lambda value: isinstance(value, list) and len(value) in lengths
                         and all(type(item) is int and 0 <= item <= MAX_COUNT for item in value),
                         f"a list of {lengths[0]}..{lengths[-1]} integers in 0..{MAX_COUNT:,}")

    def numbers(self, name: str) -> list[float]:
        """A list of numbers, as floats."""
        return [float(item) for item in self._get(
            name, Fields._REQUIRED, lambda value: isinstance(value, list) and all(
                type(item) in (int, float) and MIN_NUMBER <= item <= MAX_NUMBER for item in value),
            f"a list of numbers in {MIN_NUMBER:g}..{MAX_NUMBER:g}")]

    def number(self, name: str, default: Any = _REQUIRED, minimum: float = MIN_NUMBER) -> Any:
        """A number, as float."""
        value = self._get(name, default,
                          lambda value: isinstance(value, int | float) and minimum <= value <= MAX_NUMBER,
                          f"a number in {minimum:g}..{MAX_NUMBER:g}")
        return float(value) if isinstance(value, int) else value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._get(name, default, lambda value: isinstance(value, bool), "true or false", bools=True)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._get(name, default, lambda value: isinstance(value, str), "a string")

    def texts(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._get(name, default,
                         lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
                         "a list of strings")

    def fields(self, name: str, default: Any = _REQUIRED) -> Any:
        """A nested object, as Fields."""
        value = self._get(name, default, lambda value: isinstance(value, dict), "an object")
        return Fields(value, f"{self.where}: {_name(name)}") if isinstance(value, dict) else value

    def _get(self, name, default, is_good, expectation, bools=False):
        self.asked_for.add(name)
        value = self.values.get(name)
        if value is None:
            if default is Fields._REQUIRED:
                raise self.missing(name, expectation)
            return default
        if isinstance(value, bool) != bools or not is_good(value):
            raise self.fault(name, expectation)
        return value


def _name(name: str) -> str:
    """A field's name; one that the file made up is shown like a value."""
    return name if len(name) <= 120 and name.isprintable() else shown(name)
