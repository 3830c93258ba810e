"""The text and the bytes that name a token in answers with log-probabilities."""

from typing import Any

from ..token_bytes import TokenBytes


class TokenNames:
    """Cache of token id -> name of the token in answers with log-probabilities.

    bytes   the bytes of each token
    """

    def __init__(self, tokenizer: Any) -> None:
        self.bytes = TokenBytes(tokenizer)
        self._id_of = getattr(tokenizer, "token_to_id", None) or getattr(tokenizer, "convert_tokens_to_ids", None)
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """Return the text of a token.

        A token with an incomplete character has a text like `bytes:\\xe2\\x80`, and so has a byte token (`<0x41>`) of
        a character that is another token, so that no two tokens of a vocabulary share a name.
        """
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> str:
        content = self.bytes[token]
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = None
        if text is None or (self.bytes.is_byte_token(token) and self._is_token(text)):
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return text

    def _is_token(self, text: str) -> bool:
        return self._id_of is not None and any(
            self._id_of(each) is not None for each in (text, text.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")))
