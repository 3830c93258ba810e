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
        self._widths: dict[int, int] = {}
        self._bytes_of_characters = _bytes_of_characters()

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """Return (text, bytes). A token with an incomplete character has a text like `bytes:\\xe2\\x80`."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def width(self, token: int) -> int:
        """Return the number of characters that the token adds to the text; 0 for an omitted special token."""
        found = self._widths.get(token)
        if found is None:
            is_left_out = not self._tokenizer.decode([token], skip_special_tokens=True)
            found = self._widths[token] = 0 if is_left_out else len(self[token][0])
        return found

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            name = getattr(self._tokenizer, "id_to_token", lambda _: None)(token) or ""
            parts = [self._bytes_of_characters.get(character, -1) for character in name]
            if parts and -1 not in parts:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts), parts
        return text, list(text.encode("utf-8", "replace"))
