"""Search for stop strings in a text that arrives in pieces. Keeps nothing but the strings, whatever their lengths."""

from bisect import bisect_left
from collections.abc import Iterable

from ..errors import ConfigError, type_name


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

    def first(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """Return the stop string that is completed first, with its position; None if there is none.

        If one character completes several stop strings, the shortest is returned.

        num_seen   number of characters at the start of `text` that earlier calls have seen
        """
        strings = self._shortest_first
        if not num_seen and self._begins.isdisjoint(text):
            return None
        for end in range(num_seen + 1, len(text) + 1):
            if text.endswith(strings, 0, end):
                found = next(string for string in strings if text.endswith(string, 0, end))
                return end - len(found), found
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


def stop_strings(stop: "str | Iterable[str] | StopStrings | None") -> StopStrings | None:
    """Return the StopStrings of an option `stop`; None if it has no string.

    Raises ConfigError for a wrong type and for an empty string.
    """
    if stop is None or isinstance(stop, StopStrings):
        return stop
    if not isinstance(stop, Iterable):
        raise ConfigError(f"stop is of type {type_name(stop)}", "expected a string, a list of strings, or None",
                          "pass a list")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"{string!r:.60} is not a stop string", "expected strings of at least one character",
                              "remove it")
    return StopStrings(strings) if strings else None
