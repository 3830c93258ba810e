"""Read the arguments of a call as they arrive, and rewrite them as JSON: literals of Python, Gemma or JSON itself."""

import json
import re
from functools import lru_cache
from typing import NamedTuple

MOST_ESCAPED = 10    # characters of an escape sequence of Python, such as \U0001F600


class Dialect(NamedTuple):
    """How values are written.

    quotes      opening mark of a string -> closing mark. In strings between `"` or `'`, a backslash begins an escape
                sequence
    is_json     whether everything passes unchanged
    """

    quotes: dict[str, str]
    is_json: bool = False


JSON = Dialect({'"': '"'}, is_json=True)
PYTHON = Dialect({'"': '"', "'": "'"})
GEMMA = Dialect({'<|"|>': '<|"|>', "<escape>": "<escape>", '"': '"'})

_QUOTED = json.encoder.encode_basestring    # as json.dumps without ensure_ascii
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": "",
           "\\": "\\", "'": "'", '"': '"', "/": "/"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_JSON_OUTSIDE, _JSON_INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_WORD, _NUMBER = re.compile(r"[^\s\"'<{}\[\](),:=]+"), re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


class ValueReader:
    """Reads one object or list whose opening bracket has been read, and returns it as JSON.

    What `feed` has returned so far depends on the characters alone, not on their grouping.

    opening      `{`, `[`, or `(` for the keyword arguments of a call, which become an object
    is_done      whether the closing bracket has been read
    is_broken    whether a bracket closed another one; the reader is then done, too
    """

    __slots__ = ("_dialect", "_stack", "_inside", "_held", "_word", "_is_key", "_opens", "is_done", "is_broken",
                 "_within", "_ends")

    def __init__(self, dialect: Dialect, opening: str = "{") -> None:
        self._dialect, self._stack = dialect, [_CLOSING[opening]]
        self._inside = ""        # closing mark of the string that is being read
        self._held = ""          # begin of an escape sequence, or of a mark
        self._word, self._is_key = "", opening != "["
        self.is_done = self.is_broken = False
        self._opens = tuple(dialect.quotes)
        self._within, self._ends = _patterns(tuple(dialect.quotes.values()))

    def feed(self, text: str, pos: int, out: list[str]) -> int:
        """Read `text` from `pos` on, append JSON to `out`, and return the position after what was read."""
        if self._dialect.is_json:
            return self._feed_json(text, pos, out)
        if self._inside and not pos and not self._held and not self._ends.search(text):    # the usual case
            out.append(_escaped(text))
            return len(text)
        text, begin = self._held + text[pos:], pos - len(self._held)
        self._held, at = "", 0
        while at < len(text) and not self.is_done and not self._held:
            at = self._string(text, at, out) if self._inside else self._outside(text, at, out)
        return begin + at

    # ---------------------------------------------------------------- JSON

    def _feed_json(self, text: str, pos: int, out: list[str]) -> int:
        at = pos
        if self._held:                       # a backslash
            self._held, at = "", pos + 1
        while True:
            found = (_JSON_INSIDE if self._inside else _JSON_OUTSIDE).search(text, at)
            if found is None:
                out.append(text[pos:])
                return max(at, len(text))
            mark, at = found[0], found.end()
            if mark == "\\":
                if at == len(text):
                    self._held = mark
                    out.append(text[pos:])
                    return at
                at += 1
            elif mark == '"':
                self._inside = "" if self._inside else mark
            elif mark in "{[":
                self._stack.append(_CLOSING[mark])
            else:
                self.is_broken = self._stack.pop() != mark
                self.is_done = self.is_broken or not self._stack
                if self.is_done:
                    out.append(text[pos:at - self.is_broken])
                    return at

    # ---------------------------------------------------------------- other dialects

    def _string(self, text: str, at: int, out: list[str]) -> int:
        found = self._within[self._inside].search(text, at)
        if found is None:
            end = _begun(text, at, (self._inside,))
            out.append(_escaped(text[at:end]))
            self._held = text[end:]
            return len(text)
        out.append(_escaped(text[at:found.start()]))
        if found[0] != "\\":
            self._inside = ""
            out.append('"')
            return found.end()
        return self._escape(text, found.start(), out)

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        kind = text[at + 1: at + 2]
        end = at + 2 + _DIGITS.get(kind, 0)
        if not kind or end > len(text):
            digits = text[at + 2:]
            if not kind or all(each in "0123456789abcdefABCDEF" for each in digits):
                self._held = text[at:]
                return len(text)
        digits = text[at + 2:end]
        if kind in _DIGITS and len(digits) == _DIGITS[kind] and all(c in "0123456789abcdefABCDEF" for c in digits):
            number = int(digits, 16)
            out.append(f"\\u{number:04x}" if number < 0x10000 else _escaped(chr(number)) if number < 0x110000 else "")
            return end
        if kind in _SIMPLE:
            out.append(_escaped(_SIMPLE[kind]))
            return at + 2
        out.append("\\\\")                   # as in Python, an unknown sequence stays
        return at + 1

    def _outside(self, text: str, at: int, out: list[str]) -> int:
        for opening in self._opens:
            if text.startswith(opening, at):
                self._word = ""              # the prefix of a string
                self._inside = self._dialect.quotes[opening]
                out.append('"')
                return at + len(opening)
        if text[at] == "<" and any(opening.startswith(text[at:]) for opening in self._opens):
            self._held = text[at:]
            return len(text)
        if found := _WORD.match(text, at):
            self._word += found[0]
            return found.end()
        mark = text[at]
        if self._word:
            out.append(self._finished_word())
        if mark in _CLOSING:
            self._is_key = mark == "{"
            self._stack.append(_CLOSING[mark])
            out.append("[" if mark == "(" else mark)
        elif mark in "}])":
            expected = self._stack.pop()
            self.is_broken = expected != mark
            self.is_done = self.is_broken or not self._stack
            self._is_key = False
            if not self.is_broken:
                out.append("}" if mark == ")" and not self._stack else "]" if mark == ")" else mark)
        elif mark == "," :
            self._is_key = self._stack[-1] == "}" or len(self._stack) == 1 and self._stack[0] == ")"
            out.append(", ")
        elif mark in ":=":
            self._is_key = False
            out.append(": ")
        return at + 1

    def _finished_word(self) -> str:
        word, self._word = self._word, ""
        if self._is_key:
            return _QUOTED(word)
        if (known := _WORDS.get(word)) is not None:
            return known
        if _NUMBER.fullmatch(word):
            return word
        return _number_of(word) or _QUOTED(word)


@lru_cache(maxsize=8)
def _patterns(ends: tuple[str, ...]) -> tuple[dict[str, re.Pattern[str]], re.Pattern[str]]:
    """Return closing mark -> pattern of what ends or interrupts a string, and the pattern of its first characters."""
    within = {end: re.compile("|".join([re.escape(end), *([r"\\"] if len(end) == 1 else [])])) for end in ends}
    return within, re.compile("|".join([*(re.escape(end[0]) for end in ends), r"\\"]))


def _number_of(word: str) -> str | None:
    """Return a number of Python as JSON; None: the word is none, or JSON has no such number."""
    if len(word) > 400:
        return None
    for kind in (lambda: int(word, 0), lambda: float(word)):
        try:
            number = kind()
        except ValueError:
            continue
        return json.dumps(number) if number == number and abs(number) != float("inf") else None
    return None


def _escaped(text: str) -> str:
    """Return a text as it stands in a string of JSON."""
    return _QUOTED(text)[1:-1] if text else ""


def _begun(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Return the position of the longest end of `text` from `start` on that begins a mark; without one, its length."""
    longest = max(map(len, marks))
    for at in range(max(start, len(text) - longest + 1), len(text)):
        end = text[at:]
        if any(mark.startswith(end) for mark in marks):
            return at
    return len(text)


escaped, begun = _escaped, _begun
