"""Regular expressions, in llguidance's syntax, of strings that a format of calls writes without quotes.

A grammar of JSON strings holds schemas by itself. Formats that write fields between tags need the text as it is.
"""

from collections.abc import Mapping
from typing import Any

HELD = ("minLength", "maxLength", "pattern", "format")    # keywords of a schema that `conditions` holds

_YEAR, _DAY = "[1-9][0-9]{3}", "(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (f"({_YEAR}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)")
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}",
}

_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\x{b}\x{c}"}
_SAME = frozenset("DWStnrfv\\/.*+?()[]{}|^$-")           # escape sequences that mean the same in both syntaxes
_DOT = r"[^\n\r\x{2028}\x{2029}]"


class CannotTranslate(Exception):
    """A pattern has no equal expression. The message is the fact."""


def conditions(schema: Mapping[str, Any]) -> list[str]:
    """Return expressions that must all match the whole text of a string. Raises CannotTranslate."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    found = [f"(?s:.{{{least},{most}}})"] if least or most != "" else []
    if "pattern" in schema:
        found.append(whole_regex(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise CannotTranslate(f"the format {schema['format']!r:.64}; expected {', '.join(sorted(FORMATS))}")
        found.append(FORMATS[schema["format"]])
    return found


def whole_regex(pattern: str) -> str:
    """Return an expression that matches the whole of each text in which JSON Schema's `pattern` is found.

    The sets of ASCII characters stand for `\\d`, `\\w` and `\\s`, which mean more in Python than in JavaScript.

    Raises CannotTranslate for look-around, references, boundaries of words, and anchors within a group.
    """
    branches, units = [], []
    depth, in_set, at, begins, ends = 0, False, 0, False, False
    while at < len(pattern):
        char, size = pattern[at], 1
        if ends and not (char == "|" and depth == 0):
            raise CannotTranslate("the pattern goes on after $")
        if char == "\\":
            unit, size = _escape(pattern[at:], in_set)
        elif in_set:
            in_set, unit = char != "]", "\\" + char if char in "[&~" else _literal(char)
        elif char == "[":
            size = 2 if pattern[at + 1:at + 2] == "^" else 1
            in_set, unit = True, pattern[at:at + size]
            if pattern[at + size:at + size + 1] == "]":
                raise CannotTranslate("the pattern has an empty set")
        elif char == "|" and depth == 0:
            branches.append((begins, units, ends))
            units, begins, ends, unit = [], False, False, ""
        elif char == "^" and depth == 0 and not units and not begins:
            begins, unit = True, ""
        elif char == "$" and depth == 0:
            ends, unit = True, ""
        elif char in "^$":
            raise CannotTranslate("the pattern has an anchor within a group, or after other characters")
        elif char == "(":
            if pattern[at + 1:at + 2] == "?" and pattern[at + 2:at + 3] != ":":
                raise CannotTranslate(f"the pattern has {pattern[at:at + 4]!r}; expected groups of ( and (?: alone")
            depth, unit = depth + 1, char
        else:
            depth -= char == ")"
            unit = _DOT if char == "." else _literal(char)
        units += [unit] if unit else []
        at += size
    branches.append((begins, units, ends))
    return "|".join(("" if begins else "(?s:.*)") + "".join(units) + ("" if ends else "(?s:.*)")
                    for begins, units, ends in branches)


def _escape(rest: str, in_set: bool) -> tuple[str, int]:
    """Return what stands for the escape sequence at the start of `rest`, and its length."""
    kind = rest[1:2]
    if kind in _SETS and kind:
        return (_SETS[kind] if in_set else f"[{_SETS[kind]}]"), 2
    if kind in _SAME and kind:
        return rest[:2], 2
    size = {"x": 4, "u": 6}.get(kind, 0)
    try:
        return rf"\x{{{int(rest[2:size], 16):x}}}", size
    except ValueError:
        raise CannotTranslate(f"the pattern has {rest[:2]!r}") from None


def _literal(char: str) -> str:
    return r"\/" if char == "/" else char if char.isprintable() else rf"\x{{{ord(char):x}}}"
