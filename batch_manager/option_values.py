"""Checks of options, and their conversion to values of Python: NumPy's integers and floats are accepted."""

import json
from operator import index
from typing import Any

import numpy as np

from .errors import ConfigError, type_name

MAX_COUNT = 2**63 - 1         # a statistics record holds 64-bit integers
LONGEST_SHOWN_BITS = 256
LONGEST_NAME = 64
LONGEST_WAIT_S = 1_000_000    # eleven days; the longest wait of a thread depends on the platform


def exact_integer(value: Any) -> int | None:
    """Return an integer as an int, and None for any other value.

    Values with `__index__` are integers, for instance those of NumPy. A bool is not an integer.
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")).endswith("bool"):     # also a tensor's
        return None
    try:
        return index(value)
    except Exception:         # the value's class may be the user's
        return None


def exact_number(value: Any) -> int | float | None:
    """Return an int for an integer, a float for a float of Python or NumPy, and None for any other value."""
    return float(value) if isinstance(value, float | np.floating) else exact_integer(value)


def is_text(value: Any, errors: str = "strict") -> bool:
    """Whether a value is a str that has UTF-8: one without halves of surrogate pairs. `errors` as of str.encode."""
    try:
        return isinstance(value, str) and value.encode("utf-8", errors) is not None
    except UnicodeEncodeError:
        return False


def shown_option(value: Any) -> str:
    """Format a refused option: a number without the name of its NumPy type, any other value with repr."""
    number = exact_number(value)
    if isinstance(number, int) and number.bit_length() > LONGEST_SHOWN_BITS:    # repr may raise
        return f"an integer of {number.bit_length():,} bits"
    return repr(value if number is None else number)


def integer_in_words(minimum: int, maximum: int = MAX_COUNT, refused: int | None = None) -> str:
    """Return the allowed range of an integer in words.

    The upper limit 2^63-1 is left out unless the refused value exceeds it.
    """
    if maximum == MAX_COUNT:
        too_large = refused is not None and refused > maximum
        return f"an integer of at least {minimum}" + " and at most 2^63-1" * too_large
    return f"an integer in {minimum:,}..{maximum:,}"


def put_count(options: Any, name: str, *, minimum: int = 1, maximum: int = MAX_COUNT, optional: bool = False,
              owner: str = "", other: tuple[int, str] | None = None) -> None:
    """Replace the integer in the field `name` of a frozen dataclass with an int.

    optional   whether the field may be None
    owner      prefix of the field's name in the error, such as "BackendInfo."
    other      another valid integer and its meaning, such as (-1, "no limit")

    Raises ConfigError unless the integer is in minimum..maximum, or is `other`.
    """
    value = getattr(options, name)
    if optional and value is None:
        return
    count = exact_integer(value)
    if count is None or not (minimum <= count <= maximum or (other and count == other[0])):
        allowed = integer_in_words(minimum, maximum, count)
        allowed += f", or {other[0]} for {other[1]}" if other else ""
        allowed += ", or None" if optional else ""
        raise ConfigError(f"{owner}{name} is {shown_option(value)}", f"expected {allowed}")
    object.__setattr__(options, name, count)


def put_seconds(options: Any, name: str, *, positive: bool, owner: str = "") -> None:
    """Replace the number of seconds in the field `name` of a frozen dataclass with an int or a float.

    owner   prefix of the field's name in the error, such as "ParallelConfig."

    Raises ConfigError for a value that is no number, is below 0 or above LONGEST_WAIT_S, or is 0 despite `positive`.
    """
    value = getattr(options, name)
    seconds = exact_number(value)
    if seconds is None or not 0 <= seconds <= LONGEST_WAIT_S or (positive and seconds == 0):
        raise ConfigError(f"{owner}{name} is {shown_option(value)}",
                          f"expected a number of seconds {'above 0 and up' if positive else 'from 0'} to "
                          f"{LONGEST_WAIT_S:,}")
    object.__setattr__(options, name, seconds)


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raise ConfigError unless the value is True or False, or None if `optional`."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise ConfigError(f"{name} is {value!r}", f"expected {'True, False or None' if optional else 'True or False'}")


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of json.loads that raises ValueError for a name that an object has twice."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the name {name[:LONGEST_NAME]!r} occurs twice in one object; expected it once")
        fields[name] = value
    return fields


def object_of_option(what: str, text: str, example: str) -> dict[str, Any]:
    """Return the object of the JSON text of an option. Raises ConfigError, which begins with `what`."""
    way_out = f"pass for instance {example}"
    try:
        given = json.loads(text, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be read as JSON", str(error)[:200], way_out) from None
    if not isinstance(given, dict):
        raise ConfigError(f"{what} is JSON of type {type_name(given)}", "expected a JSON object", way_out)
    return given
