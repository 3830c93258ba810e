"""The text and the bytes that name a token in answers with log-probabilities."""

from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _bytes_of_characters() -> dict[str, int]:
    """Return character -> byte, for the characters that represent bytes in byte-level tokenizers such as GPT-2's."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


class TokenNames:
    """Cache of token id -> (text, bytes), which name the token in answers with log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._omitted: dict[int, bool] = {}
        self._bytes_of_characters = _bytes_of_characters()

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """Return (text, bytes). A token with an incomplete character has a text like `bytes:\\xe2\\x80`."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def is_omitted(self, token: int) -> bool:
        """Whether the text of an output omits the token, because it is a special token."""
        found = self._omitted.get(token)
        if found is None:
            found = self._omitted[token] = not self._tokenizer.decode([token], skip_special_tokens=True)
        return found

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            name = getattr(self._tokenizer, "id_to_token", lambda _: None)(token) or ""
            parts = [self._bytes_of_characters.get(character, -1) for character in name]
            if parts and -1 not in parts:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts), parts
        return text, list(text.encode("utf-8", "replace"))


class TextOffsets:
    """The positions of successive tokens in a text, in characters, for the field `text_offset` of completions.

    If a token begins in the middle of a character, its position is the position of this character. Each invalid
    byte sequence counts as one character, as in the text.

    offset   number of characters before the first token
    """

    def __init__(self, names: TokenNames, offset: int) -> None:
        self._names, self._offset = names, offset
        self._num_missing = 0        # bytes of the last character that are still missing

    def next(self, token: int) -> int:
        """Return the position of the next token of the text."""
        if self._names.is_omitted(token):
            return self._offset
        text, content = self._names[token]
        if self._num_missing and not 0x80 <= content[0] < 0xC0:    # the last character stays incomplete
            self._offset, self._num_missing = self._offset + 1, 0
        offset = self._offset
        if text.startswith("bytes:"):
            for byte in content:
                self._add_byte(byte)
        else:
            self._offset += len(text)
        return offset

    def _add_byte(self, byte: int) -> None:
        if self._num_missing and 0x80 <= byte < 0xC0:
            self._num_missing -= 1
        else:
            self._offset += self._num_missing > 0
            self._num_missing = (1 if 0xC2 <= byte < 0xE0 else 2 if 0xE0 <= byte < 0xF0 else
                                 3 if 0xF0 <= byte < 0xF5 else 0)
        self._offset += not self._num_missing
