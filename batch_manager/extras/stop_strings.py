"""Search for stop strings in a text that arrives in pieces. Keeps nothing but the strings, whatever their lengths."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from os.path import commonprefix
from typing import NamedTuple

from ..errors import InvalidRequestError, type_name


class StopStrings:
    """The stop strings of a text, at least one. Any number of texts may share the object.

    `first` and `begun` find a string that is complete, and text that may be the start of one. A caller that keeps the
    text from `begun` on, and passes it again before the next piece, gets the same results for every grouping of the
    text into pieces. The search then compares each character as the start of a string at most twice.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))                  # strings with the same start are neighbours
        self._shortest_first = tuple(sorted(self._sorted, key=len))
        self._begins = frozenset(string[0] for string in self._sorted)

    def first(self, text: str, num_seen: int,
              counts: Callable[[int, int], bool] | None = None) -> tuple[int, str] | None:
        """Return the stop string that is completed first, with its position; None if there is none.

        If one character completes several stop strings, the shortest is returned.

        num_seen   number of characters at the start of `text` that earlier calls have seen
        counts     function (start, end) -> whether a stop string at this place of `text` counts; None: each counts
        """
        strings = self._shortest_first
        if not num_seen and self._begins.isdisjoint(text):
            return None
        for end in range(num_seen + 1, len(text) + 1):
            if text.endswith(strings, 0, end):
                for string in strings:
                    if text.endswith(string, 0, end) and (counts is None or counts(end - len(string), end)):
                        return end - len(string), string
        return None

    def begun(self, text: str) -> int:
        """Return the position of the longest end of `text` that is the start of a stop string; without one, its length.

        `text` contains no stop string.
        """
        if self._begins.isdisjoint(text):
            return len(text)
        for start in range(max(0, len(text) - len(self._shortest_first[-1]) + 1), len(text)):
            if text[start] in self._begins:
                end = text[start:]
                place = bisect_left(self._sorted, end)
                if place < len(self._sorted) and self._sorted[place].startswith(end):
                    return start
        return len(text)


class FoundWithToken(NamedTuple):
    """A stop string with a special token, in a text that omits special tokens.

    from_start, from_end   number of characters of this text from the start of the string on, and after its end
    ends_in_token          whether the string ends in a special token
    """

    from_start: int
    from_end: int
    ends_in_token: bool
    string: str


class TextWithSpecialTokens:
    """Search for stop strings that contain special tokens, which the text of an output omits.

    The object keeps the end of a text in which special tokens are shown, as far as this end may be the start of a
    stop string with a special token in it. All other stop strings are searched in the text without special tokens. A
    stop string never ends a text within a special token: `<` does not end a text at the token `<|end|>`.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._text = ""
        self._ahead = ""    # the end of `_text` that the caller does not have yet
        self._shown: list[tuple[int, int]] = []    # places of special tokens in `_text`

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the omitting text that may belong to a stop string."""
        return max(0, len(self._text) - sum(end - start for start, end in self._shown) - len(self._ahead))

    def add_token(self, held: str, pending: str, content: str) -> FoundWithToken | None:
        """Add a special token. Return as `add` does.

        held, pending   end of the omitting text that may begin a stop string, and the text that would follow if no
                        token came after this one
        content         the special token
        """
        if not self._shown:
            self._text, self._ahead = held, ""
        num_seen = len(self._text)
        self._text += pending[len(commonprefix((pending, self._ahead))):]
        self._ahead = pending
        self._shown.append((len(self._text), len(self._text) + len(content)))
        self._text += content
        return self._search(num_seen)

    def add(self, text: str) -> FoundWithToken | None:
        """Add a piece of the omitting text. Return the stop string with a special token that is completed first."""
        if not self._shown:
            return None
        same = len(commonprefix((text, self._ahead)))
        self._ahead = self._ahead[same:] if same == len(text) else ""
        num_seen = len(self._text)
        self._text += text[same:]
        return self._search(num_seen)

    def _search(self, num_seen: int) -> FoundWithToken | None:
        found = self._strings.first(self._text, num_seen, self._has_whole_tokens)
        if found is not None:
            position, string = found
            end = position + len(string)
            return FoundWithToken(self._num_omitting(position), self._num_omitting(end),
                                  any(first < end <= last for first, last in self._shown), string)
        begun = self._strings.begun(self._text)
        self._shown = [(start - begun, end - begun) for start, end in self._shown if start >= begun]
        self._text = self._text[begun:] if self._shown else ""
        if not self._shown:
            self._ahead = ""
        return None

    def _has_whole_tokens(self, first: int, last: int) -> bool:
        """Whether the text from `first` to `last` contains special tokens, and no part of another one."""
        touched = [first <= start and end <= last for start, end in self._shown if start < last and first < end]
        return bool(touched) and all(touched)

    def _num_omitting(self, position: int) -> int:
        return len(self._text) - position - sum(max(0, end - max(start, position)) for start, end in self._shown)


def stop_strings(stop: "str | Iterable[str] | StopStrings | None") -> StopStrings | None:
    """Return the StopStrings of an option `stop`; None if it has no string.

    Raises InvalidRequestError for a wrong type and for an empty string.
    """
    if stop is None or isinstance(stop, StopStrings):
        return stop
    if not isinstance(stop, Iterable) or isinstance(stop, bytes | bytearray | Mapping):
        raise InvalidRequestError(f"stop is of type {type_name(stop)}", "expected a string, a list of strings, or None",
                                  "pass a string")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            shown = "an empty string" if isinstance(string, str) else f"a value of type {type_name(string)}"
            raise InvalidRequestError(f"stop is or contains {shown}", "expected strings of at least one character",
                                      "remove it")
    return StopStrings(strings) if strings else None
