"""JSON from an untrusted file: bounded, without duplicate keys, an object at the top; and typed access to it."""

import json
import math
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_COUNT = 2**40                    # no size in a configuration is larger; products of two stay far from overflow


def read_json_file(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object in the file. Raises ModelLoadError naming the file."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as fault:
        raise ModelLoadError(f"{path} cannot be read ({fault.strerror})") from None
    if len(data) > max_bytes:
        raise ModelLoadError(f"{path} is larger than {max_bytes:,} bytes", "no configuration needs that much")
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`. Raises ModelLoadError naming `where`."""
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
        names = [name for name, _ in pairs]
        twice = next(name for name in fields if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return fields


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


class Fields:
    """Typed access to a JSON object. A field that is absent or null takes the default; without one it is an error.

    Raises ModelLoadError naming file and field from every method.
    """

    _REQUIRED: Any = object()

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def fault(self, name: str, expectation: str, fix: str = "") -> ModelLoadError:
        """The error to raise about a field's value."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelLoadError(f"{self.where}: {name} is {shown}", expectation, fix)

    def count(self, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = MAX_COUNT) -> Any:
        return self._get(name, default, lambda value: isinstance(value, int) and minimum <= value <= maximum,
                         f"an integer in {minimum:,}..{maximum:,}")

    def number(self, name: str, default: Any = _REQUIRED, above: float = 0.0) -> Any:
        """A finite number > `above`, as float."""
        value = self._get(name, default,
                          lambda value: isinstance(value, int | float) and abs(value) < 1e300
                          and math.isfinite(value) and value > above,
                          f"a finite number above {above:g}")
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
        return Fields(value, f"{self.where}: {name}") if isinstance(value, dict) else value

    def _get(self, name, default, is_good, expectation, bools=False):
        value = self.values.get(name)
        if value is None:
            if default is Fields._REQUIRED:
                raise ModelLoadError(f"{self.where}: {name} is missing", expectation)
            return default
        if isinstance(value, bool) != bools or not is_good(value):
            raise self.fault(name, expectation)
        return value
